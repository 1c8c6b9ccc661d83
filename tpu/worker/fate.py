"""What becomes of a flow run and its processes, decided from what is seen of both.

A flow run is started again in two ways, each of which leaves its words in the state's message: by its worker, which
sees that its processes were killed, and by two automations, when worker and all are dead (deployments/automations.py:
no sign of life makes it Crashed, and that makes it AwaitingRetry). Both count towards `restarts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from prefect.client.schemas.objects import State, StateType

# A flow that is asked to end saves, ends its gang and deletes its slices itself. One that takes longer is killed, and
# the worker does the rest.
KILL_S = 30.0

RESTARTED = "Its processes were killed: started again by its worker."
TAKEN_FOR_DEAD = "No sign of life came any more: taken for dead by an automation."
RESTARTED_BY_AUTOMATION = "It had crashed: started again by an automation."
LIVES = "It was taken for dead, but its processes live: it goes on."
# Name of the last state of a flow run that is not started again any more. No automation acts on it.
GIVEN_UP = "GivenUp"
# States of type SCHEDULED that are no decision to start.
_ONLY_WAITS = ("Late", "AwaitingConcurrencySlot")

Act = Literal["wait", "ask", "kill", "ended", "say that it lives"]
# What to do with a flow run whose processes are gone: `again` starts it once more, the others say its last state.
End = Literal["leave", "again", "again later", "cancelled", "given up"]


@dataclass(frozen=True)
class Seen:
    """`begun`: its own code runs. `unwanted_s`: since when it should not go on; None while it should.

    `taken_for_dead`: by an automation, see there.
    """

    alive: bool
    begun: bool
    unwanted_s: float | None
    taken_for_dead: bool = False


def unwanted(state: State | None) -> bool:
    """Whether the processes of a flow run in this state have no right to live."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def to_end(state: State | None) -> bool:
    """Whether the processes of a flow run in this state are to save and end. Of a suspended one others may begin."""
    return unwanted(state) or (state is not None and state.is_paused())


def newest_start(history: Sequence[State]) -> Sequence[State]:
    """Of a flow run's states, the newest last, those since it was last scheduled."""
    scheduled = [place for place, state in enumerate(history) if state.type is StateType.SCHEDULED]
    return history[scheduled[-1] + 1 :] if scheduled else history


def begun(history: Sequence[State]) -> bool:
    """Whether the server has let the flow's own code run since it was last scheduled."""
    return any(state.is_running() for state in newest_start(history))


def cancelled_unheard(history: Sequence[State]) -> bool:
    """Whether it runs although it was cancelled: Prefect lets a flow begin that was set to Cancelled before."""
    states = newest_start(history)
    return bool(states) and states[-1].is_running() and any(unwanted(state) for state in states)


def taken_for_dead(history: Sequence[State]) -> bool:
    """Whether an automation spoke last: heartbeats did not arrive, for instance since the server was away."""
    return bool(history) and history[-1].message in (TAKEN_FOR_DEAD, RESTARTED_BY_AUTOMATION)


def act(seen: Seen) -> Act:
    """What the worker does now. What has not begun has nothing to save, and hears nobody."""
    if not seen.alive:
        return "ended"
    if seen.unwanted_s is None:
        return "say that it lives" if seen.taken_for_dead else "wait"
    if not seen.begun or seen.unwanted_s >= KILL_S:
        return "kill"
    return "ask"


def end(
    history: Sequence[State] | None, restarts: int, claim: UUID | None = None, cut_short: bool = False
) -> End:
    """What a flow run becomes whose processes are gone, of whose states the newest is last; None: it was deleted.

    `claim` is the id of the state by which it was claimed for these processes, `cut_short` whether its worker died
    meanwhile.
    """
    if not history:
        return "leave"
    state = history[-1]
    if _claimed_anew(history, claim) and not unwanted(state):
        return "again later"  # somebody has seen to it already, or does so now
    if state.is_cancelled() or state.is_completed() or state.is_failed() or state.name == GIVEN_UP:
        return "leave"
    if state.is_paused():
        return "leave"  # whoever resumes it schedules it
    asked_for = _since_asked_for(history)
    if any(one.is_cancelling() for one in asked_for):
        return "cancelled"  # also of one whose end was taken for a crash
    # What could not begin would only fail to begin again, unless it never had the time.
    begun_once = any(one.is_running() for one in asked_for)
    return "again" if (begun_once or cut_short) and restarted(history) < restarts else "given up"


def may_begin(history: Sequence[State], restarts: int) -> bool:
    """Whether a flow run that was claimed may start. An automation starts it again however often it crashes."""
    wanted = not any(one.is_cancelling() for one in _since_asked_for(history))
    return wanted and restarted(history) <= restarts


def restarted(history: Sequence[State]) -> int:
    """How often a flow run was started again by itself since somebody asked for it."""
    count, asked, claimed = 0, False, False
    for state in _since_asked_for(history):
        if _is_automatic(state):
            asked, claimed = True, False
        elif state.type is StateType.PENDING and asked:
            count, asked, claimed = count + 1, False, True
        elif state.message == LIVES:  # it had not been needed
            count, asked, claimed = count - claimed, False, False
    return count


def _is_automatic(state: State) -> bool:
    return state.type is StateType.SCHEDULED and state.message in (RESTARTED, RESTARTED_BY_AUTOMATION)


def _since_asked_for(history: Sequence[State]) -> Sequence[State]:
    """The states since a schedule or a person said last that it is to run."""
    asked = [
        number
        for number, state in enumerate(history)
        if state.type is StateType.SCHEDULED and state.name not in _ONLY_WAITS and not _is_automatic(state)
    ]
    return history[asked[-1] :] if asked else history


def _claimed_anew(history: Sequence[State], claim: UUID | None) -> bool:
    """Whether it was scheduled again since its claim: whoever claims it next, or has done so, is to see to it."""
    claims = [number for number, state in enumerate(history) if state.type is StateType.PENDING]
    since = next(
        (number for number, state in enumerate(history) if state.id == claim), max(claims, default=-1)
    )
    later = [
        state for state in history[since + 1 :] if state.type is StateType.SCHEDULED or state.message == LIVES
    ]
    return bool(later) and later[-1].message != LIVES
