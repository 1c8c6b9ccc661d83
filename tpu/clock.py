"""Time as an argument: code that waits takes a Clock, so that tests and simulations can bring their own."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What waiting code needs of time; all values are seconds."""

    def monotonic(self) -> float:
        """Seconds that never go back; compare only with each other."""
        ...

    def time(self) -> float:
        """Seconds since the epoch; for records, never for decisions."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def sleep_unless(clock: Clock, seconds: float, *events: asyncio.Event) -> None:
    """Sleep for so many seconds, or until one of the events is set; the caller asks them which it was."""
    if seconds <= 0 or any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(clock.sleep(seconds))]
    waits += [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
