"""What the cloud says of a slice whose hosts make trouble, or do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tpu.clock import Clock
from tpu.slices.condition import Condition, LifeView

# Nobody is blamed before the cloud has been asked for so long.
CLOUD_WORD_S = 60.0
# A machine dies a moment before the cloud says so.
CLOUD_LAG_S, CLOUD_LAG_POLL_S = 2.0, 0.25
# If all hosts of a slice go at once, it is the slice that went: preempted, or under repair. That the cloud still
# shows it READY is then most likely its lag, and it is asked for longer before the verdict falls.
SLICE_LAG_S = 15.0
# While hosts are waited for, the cloud is asked after so long, and then less and less often.
FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_GROWTH = 0.5, 10.0, 1.6

Result = TypeVar("Result")
Look = Callable[[], Awaitable[LifeView]]


class SliceLost(RuntimeError):
    """The cloud took the slice while something was done with its hosts; `seen` is its word."""

    def __init__(self, seen: LifeView) -> None:
        super().__init__(seen.reason)
        self.seen = seen


async def condition_after_trouble(look: Look, clock: Clock, all_lost: bool = False) -> LifeView:
    """What the cloud says once a host has failed: it may not answer, or not know yet, so it is asked again.

    `all_lost` says that no host of the slice answers any more.
    """
    lag_s = SLICE_LAG_S if all_lost else CLOUD_LAG_S
    began = clock.monotonic()
    while True:
        seen, waited = await look(), clock.monotonic() - began
        if seen.condition is Condition.UNKNOWN and waited < CLOUD_WORD_S:
            await clock.sleep(1.0)
        elif seen.usable and waited < lag_s:
            await clock.sleep(CLOUD_LAG_POLL_S)
        else:
            return seen


async def unless_lost(work: Coroutine[Any, Any, Result], look: Look) -> Result:
    """Do something with hosts; break it off as soon as the cloud says that they are gone for good.

    A slice that is preempted just refuses connections, and those are tried again for minutes.

    Raises:
        SliceLost: it was broken off.
    """
    task, pause = asyncio.ensure_future(work), FIRST_LOOK_S
    try:
        while True:
            await asyncio.wait({task}, timeout=pause)
            pause = min(pause * LOOK_GROWTH, LONGEST_LOOK_S)
            if task.done():
                return task.result()
            if (seen := await look()).lost:
                raise SliceLost(seen)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
