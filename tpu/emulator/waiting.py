"""Waiting that can be cut short."""

from __future__ import annotations

import asyncio

from tpu.clock import Clock


async def sleep_unless(clock: Clock, seconds: float, event: asyncio.Event) -> None:
    """Sleep for so many seconds, or until the event is set; the caller asks the event which it was."""
    if seconds <= 0 or event.is_set():
        return
    waits = [asyncio.ensure_future(clock.sleep(seconds)), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
