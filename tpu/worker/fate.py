"""What becomes of a flow run and its processes, decided from what is seen of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefect.client.schemas.objects import State, StateType

# The flow itself saves, ends its gang and deletes its slices; its supervisor kills it after 30 s. What still lives
# then is killed by the worker, which does the rest.
KILL_S = 35.0

Act = Literal["wait", "kill", "ended"]
# What to do with a flow run whose processes are gone: `again` starts it once more, the others say its last state.
End = Literal["leave", "again", "again later", "cancelled", "crashed"]


@dataclass(frozen=True)
class Seen:
    """`unwanted_s`: since when the state says that the flow run should not go on; None while it should."""

    alive: bool
    unwanted_s: float | None


def unwanted(state: State | None) -> bool:
    """Whether the processes of a flow run in this state have no right to live."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def act(seen: Seen) -> Act:
    """What the worker does now."""
    if not seen.alive:
        return "ended"
    return "kill" if seen.unwanted_s is not None and seen.unwanted_s >= KILL_S else "wait"


def end(history: Sequence[State] | None, starts: int, restarts: int) -> End:
    """What a flow run becomes whose processes are gone, of whose states the newest is last; None: it was deleted."""
    if not history:
        return "leave"
    state = history[-1]
    if state.is_cancelled() or state.is_completed() or state.is_failed():
        return "leave"
    if any(one.is_cancelling() for one in history):
        return "cancelled"  # also of one whose end was taken for a crash
    if state.type is StateType.SCHEDULED:
        return "again later"  # somebody has seen to it already
    if 0 < starts <= restarts:  # what never began would only fail to begin again
        return "again"
    return "leave" if state.is_crashed() else "crashed"
