"""The Cloud TPU API behind one Protocol: what it says, and what its errors mean."""

from tpu.cloud.errors import CloudError, ErrorKind, classify
from tpu.cloud.protocol import TpuCloud
from tpu.cloud.values import (
    Endpoint,
    Failure,
    HostIdentity,
    Node,
    NodeHealth,
    NodeRequest,
    NodeState,
    Provisioning,
    QueuedResource,
    QueuedResourceRequest,
    QueuedResourceState,
)

__all__ = [
    "CloudError",
    "Endpoint",
    "ErrorKind",
    "Failure",
    "HostIdentity",
    "Node",
    "NodeHealth",
    "NodeRequest",
    "NodeState",
    "Provisioning",
    "QueuedResource",
    "QueuedResourceRequest",
    "QueuedResourceState",
    "TpuCloud",
    "classify",
]
