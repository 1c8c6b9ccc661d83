"""What the rest of the project knows of the cloud: frozen values, without the client library's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpu.cloud.errors import ErrorKind

# How a slice is bought. Spot and preemptible ones may be taken away at any time, a preemptible one after 24 hours
# at the latest; a flex-start one ends at its own maximal run time; the other two stay until they are deleted.
Provisioning = Literal["spot", "preemptible", "on-demand", "reserved", "flex-start"]
PREEMPTIBLE: frozenset[Provisioning] = frozenset({"spot", "preemptible"})

PREEMPTIBLE_LIFE_S = 24 * 3600.0
LONGEST_FLEX_START_S = 7 * 24 * 3600.0

# Says which intent a resource was created for. It lives on the node, since queued resources have no labels.
INTENT_LABEL = "relay-intent"


class NodeState(Enum):
    """State of a node, with the API's numbers; a number that we do not know is UNKNOWN."""

    CREATING = 1
    READY = 2
    RESTARTING = 3
    REIMAGING = 4
    DELETING = 5
    REPAIRING = 6
    STOPPED = 8
    STOPPING = 9
    STARTING = 10
    PREEMPTED = 11
    TERMINATED = 12
    HIDING = 13
    HIDDEN = 14
    UNHIDING = 15
    UNKNOWN = 16

    @classmethod
    def _missing_(cls, value: object) -> NodeState:
        return cls.UNKNOWN


class NodeHealth(Enum):
    """Health of a node, with the API's numbers. UNREPORTED is the API's "unspecified"."""

    UNREPORTED = 0
    HEALTHY = 1
    TIMEOUT = 3
    UNHEALTHY_TENSORFLOW = 4
    UNHEALTHY_MAINTENANCE = 5
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> NodeHealth:
        return cls.UNKNOWN


class QueuedResourceState(Enum):
    """State of a queued resource, with the API's numbers; a number that we do not know is UNKNOWN."""

    UNKNOWN = 0
    CREATING = 1
    ACCEPTED = 2
    PROVISIONING = 3
    FAILED = 4
    DELETING = 5
    ACTIVE = 6
    SUSPENDING = 7
    SUSPENDED = 8
    WAITING_FOR_RESOURCES = 9

    @classmethod
    def _missing_(cls, value: object) -> QueuedResourceState:
        return cls.UNKNOWN


@dataclass(frozen=True)
class Endpoint:
    """Addresses of one host; `external` is None when the node has no external addresses."""

    internal: str
    external: str | None


@dataclass(frozen=True)
class HostIdentity:
    """What a host published of itself: its public SSH key ("ssh-ed25519 AAAA…") and its VM's name."""

    key: str
    hostname: str | None


@dataclass(frozen=True)
class Failure:
    """Why the cloud says something failed."""

    kind: ErrorKind
    code: int
    message: str


@dataclass(frozen=True)
class Node:
    """One TPU node (a slice). `endpoints` are in worker order; `created` is in seconds since the epoch.

    Metadata is left out: it can be large, and nothing decides by it.
    """

    name: str
    zone: str
    state: NodeState
    health: NodeHealth
    accelerator_type: str
    runtime_version: str
    endpoints: tuple[Endpoint, ...]
    spot: bool  # spot or preemptible
    reserved: bool
    queued_resource: str | None
    health_description: str = ""
    uid: str = ""
    created: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QueuedResource:
    """One queued resource; `labels` are those of its first node's specification.

    `by_user` is True when the API says that a user, not the service, began the present state.
    """

    name: str
    zone: str
    state: QueuedResourceState
    accelerator_type: str
    node_names: tuple[str, ...]
    spot: bool  # spot or preemptible
    failure: Failure | None = None
    by_user: bool = False
    created: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeRequest:
    """A node to be made.

    `intent` goes into the node's labels; creating a name that exists is a success exactly if it was
    created for the same intent. `network`, `subnetwork` and `service_account` are the project's defaults
    if None. `max_run_s` is the life of a flex-start node, in seconds; the others have none.

    Raises:
        ValueError: a flex-start node without a life of at most seven days, or another with one.
    """

    accelerator_type: str
    runtime_version: str
    provisioning: Provisioning
    intent: str
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    service_account: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_run_s: float | None = None

    def __post_init__(self) -> None:
        if (self.provisioning == "flex-start") != (self.max_run_s is not None):
            raise ValueError(
                f"max_run_s is the life of a flex-start node and of no other: "
                f"found {self.max_run_s} for {self.provisioning}"
            )
        if self.max_run_s is not None and not 0 < self.max_run_s <= LONGEST_FLEX_START_S:
            raise ValueError(
                f"max_run_s must be above 0 and at most {LONGEST_FLEX_START_S:g} seconds (7 days), "
                f"found {self.max_run_s}"
            )


@dataclass(frozen=True)
class QueuedResourceRequest:
    """A queued resource with one node, which gets the queued resource's own name."""

    node: NodeRequest
