"""The life of a slice, as a table: (state, signal) to (state, what has to be done). Pure.

The signals of a look at the cloud come from `tpu.slices.condition`. Not knowing is a state of its own, from
which nothing but another look follows; every path ends in a deletion that the cloud has confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from tpu.slices.condition import Condition, LifeView


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
    return Signal.SEEN_GONE if seen.gone else _SIGNALS[seen.condition]


def step(state: LifeState, signal: Signal) -> Next:
    """Next state, and what has to be done, in this order."""
    return _TABLE[state][signal]


def was_ready(state: LifeState) -> bool:
    """True if the slice has been seen ready before: see tpu.slices.condition.Look."""
    return state in (LifeState.READY, LifeState.RECOVERING, LifeState.UNSURE_READY)
