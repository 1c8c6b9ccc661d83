"""The life of a slice, as a table: (state, signal) to (state, what has to be done). Pure.

Whether a slice is used stands in its lease (tpu.slices.lease), which anybody may take at any moment by
compare-and-set. So a deletion has two steps: the lease is closed, by compare-and-set too, and only when that is
done the cloud is asked. That is why no slice is both leased and deleted, whoever is first. What a look at the
cloud says comes from tpu.slices.condition; not knowing is a state of its own, from which nothing but another look
follows; every path ends in a deletion that the cloud has confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from tpu.slices.condition import Condition, LifeView


class LifeState(Enum):
    """Where a slice is in its life, as far as we know."""

    INTENDED = "intended"  # the intent is written; the cloud has not answered
    COMING = "coming"  # asked for
    UNSURE = "unsure"  # asked for, and the cloud cannot be asked how it goes
    READY = "ready"
    RECOVERING = "recovering"  # was ready, and comes back by itself
    UNSURE_READY = "unsure, was ready"
    RETIRING = "retiring"  # nobody may take it any more; deleted as soon as nobody holds it
    CLOSING = "closing"  # lost or never made: its lease is being closed, whoever has it
    DELETING = "deleting"  # its lease is closed; deletion not confirmed yet
    GONE = "gone"  # the cloud confirmed: it knows the slice no more


class Signal(Enum):
    """What can happen to a slice."""

    INTENT_WRITTEN = "intent written"
    CREATION_ACCEPTED = "creation accepted"
    CREATION_REFUSED = "creation refused"
    SEEN_COMING = "seen coming"
    SEEN_READY = "seen ready"
    SEEN_RECOVERING = "seen recovering"
    SEEN_LOST = "seen lost"
    SEEN_GONE = "seen gone"
    UNSEEN = "could not be seen"
    HOST_DROPPED = "a host's connection dropped, or it fell silent"
    HOST_NOTICED = "a host was told that it will be preempted"
    HOST_SICK = "programs fail on it that do not fail elsewhere, or its chips stay busy"
    OVERDUE = "what is waited for takes longer than its deadline"
    ENDS_SOON = "its time is nearly over: 24 h, or the longest run it was asked for"
    UNWANTED = "nobody wants it any more"
    LEASE_FREED = "nobody holds it any more"
    LEASE_CLOSED = "its lease is closed: nobody holds it, nobody can take it"
    LEASE_HELD = "its lease could not be closed, since somebody holds it"


class Effect(Enum):
    """What has to be done. Every one may be done twice without harm."""

    CREATE = "ask the cloud for it"
    LOOK = "look at the cloud now"
    NOTE_READY = "write into its lease that it is ready"
    NOTE_LOSS = "remember the loss in the health of its zone"
    BAR = "let nobody take it any more; who holds it may go on"
    CLOSE_IF_FREE = "close its lease, unless somebody holds it"
    CLOSE = "close its lease, and end what is held: the cloud has taken the slice"
    DELETE = "ask the cloud to delete it"
    NOTE_GONE = "write into its lease that it is gone, and costs nothing any more"


_SIGNALS = {
    Condition.COMING: Signal.SEEN_COMING,
    Condition.READY_HEALTHY: Signal.SEEN_READY,
    Condition.RECOVERING: Signal.SEEN_RECOVERING,
    Condition.LOST: Signal.SEEN_LOST,
    Condition.UNKNOWN: Signal.UNSEEN,
}

Next = tuple[LifeState, tuple[Effect, ...]]
Row = Mapping[Signal, Next]

_S, _E, _G = LifeState, Effect, Signal
_READY: Next = (_S.READY, (_E.NOTE_READY,))
_LOST: Next = (_S.CLOSING, (_E.NOTE_LOSS, _E.CLOSE))
_NEVER_MADE: Next = (_S.CLOSING, (_E.CLOSE,))
_RETIRE: Next = (_S.RETIRING, (_E.BAR, _E.CLOSE_IF_FREE))
_DELETE: Next = (_S.DELETING, (_E.DELETE,))
_TAKEN_AWAY: Row = dict.fromkeys((_G.SEEN_LOST, _G.SEEN_GONE), _LOST)


def _wanted(state: LifeState) -> Row:
    """Of a slice that somebody may use. If it is held when nobody else wants it, it stays as it is."""
    return {
        **_TAKEN_AWAY,
        _G.SEEN_READY: _READY,
        # The notice comes 30 s ahead of the loss: who holds the slice saves meanwhile.
        _G.HOST_NOTICED: _RETIRE,
        _G.HOST_SICK: _RETIRE,
        _G.ENDS_SOON: _RETIRE,
        _G.UNWANTED: (state, (_E.CLOSE_IF_FREE,)),
        _G.LEASE_CLOSED: _DELETE,
    }


def _on_its_way(state: LifeState) -> Row:
    return {
        **_wanted(state),
        _G.CREATION_REFUSED: _NEVER_MADE,
        _G.SEEN_COMING: (_S.COMING, ()),
        _G.SEEN_RECOVERING: (_S.COMING, ()),
        _G.UNSEEN: (_S.UNSURE, ()),
        _G.OVERDUE: _RETIRE,
    }


def _was_ready(state: LifeState) -> Row:
    return {
        **_wanted(state),
        _G.SEEN_COMING: (_S.RECOVERING, ()),
        _G.SEEN_RECOVERING: (_S.RECOVERING, ()),
        _G.UNSEEN: (_S.UNSURE_READY, ()),
        _G.HOST_DROPPED: (state, (_E.LOOK,)),
    }


# Names never recur, so what shows under a name that was given up is a creation that arrived late. DELETING shows
# as LOST: that deletion goes on, and if the cloud forgets it, it is overdue.
_SHOWS_AGAIN: Row = dict.fromkeys(
    (_G.CREATION_ACCEPTED, _G.SEEN_COMING, _G.SEEN_READY, _G.SEEN_RECOVERING), _DELETE
)

# What a row leaves out changes nothing.
_ROWS: Mapping[LifeState, Row] = {
    _S.INTENDED: {
        **_on_its_way(_S.INTENDED),
        _G.INTENT_WRITTEN: (_S.INTENDED, (_E.CREATE,)),
        _G.CREATION_ACCEPTED: (_S.COMING, ()),
        _G.UNSEEN: (_S.INTENDED, ()),
        # An intent of an earlier life of ours, which never sent it: a new one gets a new name.
        _G.SEEN_GONE: _NEVER_MADE,
    },
    _S.COMING: _on_its_way(_S.COMING),
    # Nothing is given up because the cloud does not answer: for all we know it is ready by now.
    _S.UNSURE: {**_on_its_way(_S.UNSURE), _G.OVERDUE: (_S.UNSURE, ())},
    _S.READY: {**_was_ready(_S.READY), _G.SEEN_READY: (_S.READY, ())},
    _S.RECOVERING: {**_was_ready(_S.RECOVERING), _G.OVERDUE: _RETIRE},
    _S.UNSURE_READY: _was_ready(_S.UNSURE_READY),
    _S.RETIRING: {
        **_TAKEN_AWAY,
        _G.CREATION_REFUSED: _NEVER_MADE,
        _G.UNWANTED: _RETIRE,
        _G.LEASE_FREED: _RETIRE,
        _G.LEASE_CLOSED: _DELETE,
    },
    _S.CLOSING: {_G.LEASE_CLOSED: _DELETE, _G.UNWANTED: _NEVER_MADE},
    _S.DELETING: {**_SHOWS_AGAIN, _G.OVERDUE: _DELETE, _G.SEEN_GONE: (_S.GONE, (_E.NOTE_GONE,))},
    _S.GONE: {**_SHOWS_AGAIN, _G.SEEN_LOST: _DELETE},
}


def signal_of(seen: LifeView) -> Signal:
    """The signal that a look at the cloud gives."""
    return Signal.SEEN_GONE if seen.gone else _SIGNALS[seen.condition]


def step(state: LifeState, signal: Signal) -> Next:
    """Next state, and what has to be done, in this order."""
    return _ROWS[state].get(signal, (state, ()))


def alive(state: LifeState) -> bool:
    """True while the slice is there or on its way, and nobody has given it up."""
    return state not in (LifeState.RETIRING, LifeState.CLOSING, LifeState.DELETING, LifeState.GONE)
