"""The life of a slice: what the cloud's answers mean, and what follows from them. Pure.

Two tables. `view` reads one look at the cloud (queued resource and node) as a condition of the slice;
`step` takes a slice's state and a signal to the next state and what has to be done. UNKNOWN means that we
could not find out: it is neither dead nor alive, and nothing but another look follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tpu.cloud import Node, NodeHealth, NodeState, QueuedResource, QueuedResourceState


class Condition(Enum):
    """What a look at the cloud says about a slice."""

    COMING = "coming"
    READY_HEALTHY = "ready"
    RECOVERING = "recovering"
    LOST = "lost"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LifeView:
    """A condition and the sentence that says why.

    `preempted` is True when the cloud took the slice away from us, as it may do with a spot slice; it is
    meaningful for LOST and GONE only.
    """

    condition: Condition
    reason: str
    preempted: bool = False

    @property
    def usable(self) -> bool:
        return self.condition is Condition.READY_HEALTHY

    @property
    def over(self) -> bool:
        """True if the slice will never be usable again. UNKNOWN is not over."""
        return self.condition in (Condition.LOST, Condition.GONE)


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
        return LifeView(Condition.GONE, "the cloud no longer knows the slice", preempted=look.spot)
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


class LifeState(Enum):
    """Where a slice is in its life, as far as we know."""

    INTENDED = "intended"  # the intent is written; nothing was sent
    COMING = "coming"  # asked for
    READY = "ready"
    RECOVERING = "recovering"  # was ready, and comes back by itself
    UNSURE = "unsure"  # asked for, and the cloud cannot be asked how it goes
    UNSURE_READY = "unsure, was ready"
    DELETING = "deleting"  # deletion wanted, not confirmed yet
    GONE = "gone"  # the cloud confirmed: it knows the slice no more


class Signal(Enum):
    """What can happen to a slice."""

    CREATION_SENT = "creation sent"
    CREATION_REFUSED = "creation refused"
    SEEN_COMING = "seen coming"
    SEEN_READY = "seen ready"
    SEEN_RECOVERING = "seen recovering"
    SEEN_LOST = "seen lost"
    SEEN_GONE = "seen gone"
    UNSEEN = "could not be seen"
    RELEASED = "nobody wants it any more"


class Effect(Enum):
    """What has to be done. Every one may be done twice without harm."""

    DELETE = "ask the cloud to delete it"
    ANNOUNCE_READY = "tell who waits that it is ready"
    ANNOUNCE_LOSS = "tell who uses it that it is lost"
    ANNOUNCE_GONE = "note that it costs nothing any more"


_SIGNALS = {
    Condition.COMING: Signal.SEEN_COMING,
    Condition.READY_HEALTHY: Signal.SEEN_READY,
    Condition.RECOVERING: Signal.SEEN_RECOVERING,
    Condition.LOST: Signal.SEEN_LOST,
    Condition.GONE: Signal.SEEN_GONE,
    Condition.UNKNOWN: Signal.UNSEEN,
}

Next = tuple[LifeState, tuple[Effect, ...]]

_S, _E, _G = LifeState, Effect, Signal
_LOST: Next = (_S.DELETING, (_E.ANNOUNCE_LOSS, _E.DELETE))
_VANISHED: Next = (_S.GONE, (_E.ANNOUNCE_LOSS, _E.ANNOUNCE_GONE))
_DELETE: Next = (_S.DELETING, (_E.DELETE,))
_BECAME_READY: Next = (_S.READY, (_E.ANNOUNCE_READY,))

# Rows are complete: test_life.py holds that every state has an answer to every signal. Deletion is only
# over when the cloud does not know the slice any more; a deletion that left something is sent again.
_TABLE: Mapping[LifeState, Mapping[Signal, Next]] = {
    _S.INTENDED: {
        _G.CREATION_SENT: (_S.COMING, ()),
        _G.CREATION_REFUSED: _DELETE,  # it may have been made in spite of the error
        _G.SEEN_COMING: (_S.COMING, ()),  # our creation of an earlier life
        _G.SEEN_READY: _BECAME_READY,
        _G.SEEN_RECOVERING: (_S.COMING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: (_S.INTENDED, ()),  # not made yet
        _G.UNSEEN: (_S.INTENDED, ()),
        _G.RELEASED: _DELETE,  # a creation may be on its way
    },
    _S.COMING: {
        _G.CREATION_SENT: (_S.COMING, ()),
        _G.CREATION_REFUSED: _DELETE,
        _G.SEEN_COMING: (_S.COMING, ()),
        _G.SEEN_READY: _BECAME_READY,
        _G.SEEN_RECOVERING: (_S.COMING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: _VANISHED,
        _G.UNSEEN: (_S.UNSURE, ()),
        _G.RELEASED: _DELETE,
    },
    _S.UNSURE: {
        _G.CREATION_SENT: (_S.UNSURE, ()),
        _G.CREATION_REFUSED: _DELETE,
        _G.SEEN_COMING: (_S.COMING, ()),
        _G.SEEN_READY: _BECAME_READY,
        _G.SEEN_RECOVERING: (_S.COMING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: _VANISHED,
        _G.UNSEEN: (_S.UNSURE, ()),
        _G.RELEASED: _DELETE,
    },
    _S.READY: {
        _G.CREATION_SENT: (_S.READY, ()),
        _G.CREATION_REFUSED: (_S.READY, ()),  # an answer that comes late
        _G.SEEN_COMING: (_S.RECOVERING, ()),
        _G.SEEN_READY: (_S.READY, ()),
        _G.SEEN_RECOVERING: (_S.RECOVERING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: _VANISHED,
        _G.UNSEEN: (_S.UNSURE_READY, ()),
        _G.RELEASED: _DELETE,
    },
    _S.RECOVERING: {
        _G.CREATION_SENT: (_S.RECOVERING, ()),
        _G.CREATION_REFUSED: (_S.RECOVERING, ()),
        _G.SEEN_COMING: (_S.RECOVERING, ()),
        _G.SEEN_READY: _BECAME_READY,
        _G.SEEN_RECOVERING: (_S.RECOVERING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: _VANISHED,
        _G.UNSEEN: (_S.UNSURE_READY, ()),
        _G.RELEASED: _DELETE,
    },
    _S.UNSURE_READY: {
        _G.CREATION_SENT: (_S.UNSURE_READY, ()),
        _G.CREATION_REFUSED: (_S.UNSURE_READY, ()),
        _G.SEEN_COMING: (_S.RECOVERING, ()),
        _G.SEEN_READY: _BECAME_READY,  # it may have been recovering before we lost sight of it
        _G.SEEN_RECOVERING: (_S.RECOVERING, ()),
        _G.SEEN_LOST: _LOST,
        _G.SEEN_GONE: _VANISHED,
        _G.UNSEEN: (_S.UNSURE_READY, ()),
        _G.RELEASED: _DELETE,
    },
    _S.DELETING: {
        _G.CREATION_SENT: _DELETE,  # a creation that was overtaken by the deletion
        _G.CREATION_REFUSED: (_S.DELETING, ()),
        _G.SEEN_COMING: _DELETE,
        _G.SEEN_READY: _DELETE,
        _G.SEEN_RECOVERING: _DELETE,
        _G.SEEN_LOST: _DELETE,
        _G.SEEN_GONE: (_S.GONE, (_E.ANNOUNCE_GONE,)),
        _G.UNSEEN: (_S.DELETING, ()),
        _G.RELEASED: (_S.DELETING, ()),
    },
    # Names never recur, so what shows under a name that was gone is a creation that arrived late.
    _S.GONE: {
        _G.CREATION_SENT: _DELETE,
        _G.CREATION_REFUSED: (_S.GONE, ()),
        _G.SEEN_COMING: _DELETE,
        _G.SEEN_READY: _DELETE,
        _G.SEEN_RECOVERING: _DELETE,
        _G.SEEN_LOST: _DELETE,
        _G.SEEN_GONE: (_S.GONE, ()),
        _G.UNSEEN: (_S.GONE, ()),
        _G.RELEASED: (_S.GONE, ()),
    },
}


def signal_of(seen: LifeView) -> Signal:
    """The signal that a look at the cloud gives."""
    return _SIGNALS[seen.condition]


def step(state: LifeState, signal: Signal) -> Next:
    """Next state, and what has to be done, in this order."""
    return _TABLE[state][signal]


def was_ready(state: LifeState) -> bool:
    """True if the slice has been seen ready before: see Look."""
    return state in (LifeState.READY, LifeState.RECOVERING, LifeState.UNSURE_READY)
