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
