"""What becomes of a flow run and its processes, decided from what is seen of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefect.client.schemas.objects import State, StateType

# A flow that is asked to end saves, ends its gang and deletes its slices itself. One that takes longer is killed, and
# the worker does the rest.
KILL_S = 30.0

Act = Literal["wait", "ask", "kill", "ended"]
# What to do with a flow run whose processes are gone: `again` starts it once more, the others say its last state.
End = Literal["leave", "again", "again later", "cancelled", "crashed"]


@dataclass(frozen=True)
class Seen:
    """`begun`: its own code runs. `unwanted_s`: since when it should not go on; None while it should."""

    alive: bool
    begun: bool
    unwanted_s: float | None


def unwanted(state: State | None) -> bool:
    """Whether the processes of a flow run in this state have no right to live."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


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


def act(seen: Seen) -> Act:
    """What the worker does now. What has not begun has nothing to save, and hears nobody."""
    if not seen.alive:
        return "ended"
    if seen.unwanted_s is None:
        return "wait"
    if not seen.begun or seen.unwanted_s >= KILL_S:
        return "kill"
    return "ask"


def end(history: Sequence[State] | None, starts: int, restarts: int, cut_short: bool = False) -> End:
    """What a flow run becomes whose processes are gone, of whose states the newest is last; None: it was deleted.

    `starts` is how often its own code began, `cut_short` whether its worker died meanwhile.
    """
    if not history:
        return "leave"
    state = history[-1]
    if state.is_cancelled() or state.is_completed() or state.is_failed():
        return "leave"
    if any(one.is_cancelling() for one in newest_start(history)):
        return "cancelled"  # also of one whose end was taken for a crash
    if state.type is StateType.SCHEDULED:
        return "again later"  # somebody has seen to it already
    # What could not begin would only fail to begin again, unless it never had the time.
    if 0 < starts <= restarts or (starts == 0 and cut_short):
        return "again"
    return "leave" if state.is_crashed() else "crashed"
