"""What the cloud says of a slice, read as a condition.

`view` is the pure table from one look (queued resource and node) to a condition; `slice_condition` takes
the look. UNKNOWN means that we could not find out: it is neither dead nor alive, and nothing but another
look follows from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tpu.cloud import (
    CloudError,
    ErrorKind,
    Node,
    NodeHealth,
    NodeState,
    QueuedResource,
    QueuedResourceState,
    TpuCloud,
)


class Condition(Enum):
    """What a look at the cloud says about a slice."""

    COMING = "coming"
    READY_HEALTHY = "ready"
    RECOVERING = "recovering"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LifeView:
    """A condition and the sentence that says why.

    Of a LOST slice `preempted` says that the cloud took it away, as it may do with a spot slice, and `gone`
    that the cloud knows neither queued resource nor node any more, so that nothing is left to delete.
    """

    condition: Condition
    reason: str
    preempted: bool = False
    gone: bool = False

    @property
    def usable(self) -> bool:
        return self.condition is Condition.READY_HEALTHY

    @property
    def lost(self) -> bool:
        """True if the slice will never be usable again. UNKNOWN is not lost."""
        return self.condition is Condition.LOST


@dataclass(frozen=True)
class Look:
    """One look at the cloud. None means that the cloud says NOT_FOUND, never that we could not ask.

    `was_ready` is True once the slice has been seen ready: a spot node that shows any other state after
    that is lost, while before it is on its way.
    """

    queued_resource: QueuedResource | None
    node: Node | None
    spot: bool
    was_ready: bool


_QUEUE_WAITS = {
    QueuedResourceState.CREATING: "the cloud is taking the request in",
    QueuedResourceState.ACCEPTED: "waiting for capacity",
    QueuedResourceState.WAITING_FOR_RESOURCES: "waiting for capacity",
    QueuedResourceState.PROVISIONING: "capacity found, the node is being made",
}

# States that a node goes through on its way up. A spot node that was ready does not go through them again.
_NODE_COMES = frozenset({NodeState.CREATING, NodeState.STARTING})

# An on-demand or reserved node comes back by itself out of these.
_NODE_RECOVERS = frozenset(
    {
        NodeState.CREATING,
        NodeState.STARTING,
        NodeState.RESTARTING,
        NodeState.REIMAGING,
        NodeState.REPAIRING,
        NodeState.HIDING,
        NodeState.HIDDEN,
        NodeState.UNHIDING,
    }
)

_ILL = frozenset({NodeHealth.TIMEOUT, NodeHealth.UNHEALTHY_TENSORFLOW, NodeHealth.UNHEALTHY_MAINTENANCE})


def view(look: Look) -> LifeView:
    """What a look means. The queued resource's end outranks the node: a node can be READY a little longer."""
    queued, node = look.queued_resource, look.node
    if queued is None and node is None:
        return LifeView(Condition.LOST, "the cloud no longer knows the slice", preempted=look.spot, gone=True)
    if queued is not None and (ended := _queue_ended(queued, look.spot)):
        return ended
    if node is not None:
        seen = _view_node(node, look)
        if seen.usable and queued is not None and not look.was_ready:
            return _confirm_active(queued, seen)
        return seen
    assert queued is not None
    if look.was_ready:
        return LifeView(Condition.LOST, "the node is gone", preempted=look.spot)
    if queued.state in _QUEUE_WAITS:
        return LifeView(Condition.COMING, _QUEUE_WAITS[queued.state])
    if queued.state is QueuedResourceState.ACTIVE:
        return LifeView(Condition.COMING, "the queue is done, the node does not show yet")
    return LifeView(Condition.UNKNOWN, f"the queued resource is {queued.state.name}")


def _queue_ended(queued: QueuedResource, spot: bool) -> LifeView | None:
    if queued.state is QueuedResourceState.FAILED:
        why = queued.failure.message if queued.failure else "the cloud gives no reason"
        return LifeView(Condition.LOST, f"the queued resource FAILED: {why}")
    if queued.state in (QueuedResourceState.SUSPENDING, QueuedResourceState.SUSPENDED):
        return LifeView(
            Condition.LOST, f"the queued resource is {queued.state.name}", preempted=not queued.by_user
        )
    if queued.state is QueuedResourceState.DELETING:
        return LifeView(
            Condition.LOST, "the queued resource is DELETING", preempted=spot and not queued.by_user
        )
    return None


def _view_node(node: Node, look: Look) -> LifeView:
    state = f"the node is {node.state.name}"
    if node.state is NodeState.READY:
        return _view_ready_node(node, look.spot)
    if node.state is NodeState.PREEMPTED:
        return LifeView(Condition.LOST, state, preempted=True)
    if not look.was_ready and node.state in _NODE_COMES:
        return LifeView(Condition.COMING, state)
    if node.state is NodeState.UNKNOWN and not (look.spot and look.was_ready):
        return LifeView(Condition.UNKNOWN, state)
    if not look.spot and node.state in _NODE_RECOVERS:
        return LifeView(Condition.RECOVERING, state)
    # Preemptions have been reported under other names than PREEMPTED, so a spot node that is not READY is
    # lost whatever it is called: waiting for it has no end, and it is deleted before another is made.
    return LifeView(Condition.LOST, state, preempted=look.spot)


def _view_ready_node(node: Node, spot: bool) -> LifeView:
    if node.health in _ILL:
        told = f" ({node.health_description})" if node.health_description else ""
        reason = f"the node is READY but {node.health.name}{told}"
        return LifeView(Condition.LOST if spot else Condition.RECOVERING, reason)
    if node.health is NodeHealth.UNKNOWN:
        return LifeView(Condition.UNKNOWN, "the node is READY with a health that we do not know")
    # A health that is not reported says nothing against the node; its hosts are asked by SSH anyway.
    return LifeView(Condition.READY_HEALTHY, "the node is READY")


def _confirm_active(queued: QueuedResource, seen: LifeView) -> LifeView:
    if queued.state is QueuedResourceState.ACTIVE:
        return seen
    return LifeView(Condition.COMING, f"the node is READY, the queued resource still {queued.state.name}")


async def take_look(cloud: TpuCloud, zone: str, name: str, *, spot: bool, was_ready: bool) -> Look:
    """Ask for queued resource and node at once. `spot` counts only if the cloud knows neither any more.

    Raises:
        CloudError: the cloud could not be asked, or refused to say.
    """
    queued, node = await asyncio.gather(
        _unless_missing(cloud.get_queued_resource(zone, name)), _unless_missing(cloud.get_node(zone, name))
    )
    return look_of(queued, node, spot=spot, was_ready=was_ready)


def look_of(queued: QueuedResource | None, node: Node | None, *, spot: bool, was_ready: bool) -> Look:
    """A look with these answers. `spot` counts only if the cloud knows neither any more."""
    known = queued or node
    return Look(queued, node, spot=known.spot if known else spot, was_ready=was_ready)


def absent(look: Look) -> bool:
    """True if the slice counts as lost only because something is not there any more."""
    queued, node = look.queued_resource, look.node
    if node is not None:
        return False
    return queued is None or (look.was_ready and _queue_ended(queued, look.spot) is None)


async def slice_condition(
    cloud: TpuCloud, zone: str, name: str, *, spot: bool = True, was_ready: bool = True
) -> LifeView:
    """What the cloud says of a slice now. Never raises for the cloud's errors: they are UNKNOWN."""
    try:
        return view(await take_look(cloud, zone, name, spot=spot, was_ready=was_ready))
    except CloudError as error:
        return LifeView(Condition.UNKNOWN, str(error))


Found = TypeVar("Found")


async def _unless_missing(asked: Awaitable[Found]) -> Found | None:
    try:
        return await asked
    except CloudError as error:
        if error.kind is ErrorKind.NOT_FOUND:
            return None
        raise
