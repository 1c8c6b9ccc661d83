"""The Cloud TPU API behind one Protocol: what it says, and what its errors mean."""

from tpu.cloud.errors import CloudError, ErrorKind, classify
from tpu.cloud.protocol import TpuCloud
from tpu.cloud.values import (
    LONGEST_FLEX_START_S,
    PREEMPTIBLE,
    PREEMPTIBLE_LIFE_S,
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
    "LONGEST_FLEX_START_S",
    "PREEMPTIBLE",
    "PREEMPTIBLE_LIFE_S",
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
