"""Waiting that can be cut short."""

from __future__ import annotations

import asyncio

from tpu.clock import Clock


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
