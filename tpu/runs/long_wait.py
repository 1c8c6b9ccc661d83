"""A run that has waited for long and has no slice notes so in its history, once a wait, so that a person may hear."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.runs.event_log import EventLog, RunEvent
from tpu.runs.waiting_board import load_waiting

LONG_S = 3600.0
LOOK_S = 10.0
# What begins anew: a run that is started again may have been left alone for days.
_OVER = ("slice-ready", "slice-leased", "driver-started")


def waits_since(events: Sequence[RunEvent]) -> float | None:
    """Since when a driver has wanted a slice and had none; None if it has one, or has said so already. Pure."""
    since, told = None, False
    for event in events:
        if event.kind in _OVER:
            since, told = None, False
        elif event.kind == "slice-wanted" and since is None:
            since = event.time
        elif event.kind == "no-capacity":
            told = True
    return None if told else since


async def note_long_waits(log: EventLog, run_dir: str, clock: Clock, long_s: float = LONG_S) -> None:
    """Watch a run's history for as long as the run is driven."""
    while True:
        since = waits_since(log.events)
        if since is not None and clock.time() - since >= long_s:
            with contextlib.suppress(StorageUnavailable):  # at the next look then
                shown = await asyncio.to_thread(load_waiting, run_dir)
                if waits_since(log.events) == since:
                    await log.note("no-capacity", hours=long_s / 3600, why=list(shown.lines) if shown else [])
        await clock.sleep(LOOK_S)
