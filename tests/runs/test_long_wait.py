"""A run without a slice says so after an hour, once a wait."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.runs.conftest import Track, until
from tests.runs.histories import at, intended, leased
from tpu.runs.event_log import EventLog, RunEvent
from tpu.runs.long_wait import LONG_S, note_long_waits, waits_since

WANTED = at(10, "slice-wanted")


@pytest.mark.parametrize(
    ("history", "since"),
    [
        ([], None),
        ([WANTED], 10),
        # What is asked for meanwhile is not had.
        ([WANTED, intended(20, "a"), at(30, "provision-failed", slice="a", reason="-"), at(40, "slice-wanted")], 10),
        ([WANTED, intended(20, "a"), at(30, "slice-ready", slice="a")], None),
        ([WANTED, leased(30, "a", [0])], None),
        ([WANTED, at(30, "slice-ready", slice="a"), at(90, "slice-wanted")], 90),
        ([WANTED, at(3610, "no-capacity", hours=1.0, why=[])], None),
        ([WANTED, at(3610, "no-capacity", hours=1.0, why=[]), at(3700, "slice-wanted")], None),
        # Between two drivers a run may have been left alone for days.
        ([WANTED, at(5, "driver-started"), at(90000, "slice-wanted")], 90000),
    ],
)  # fmt: skip
def test_since_when_a_run_waits(history: list[RunEvent], since: float | None):
    assert waits_since(history) == since


class Hurried:
    """A clock on which whoever sleeps has slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    monotonic = time

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


async def test_it_is_said_after_an_hour_and_once(track: Track):
    clock = Hurried()
    log = EventLog(track.directory("patient"), 1, clock.time)
    log.append("slice-wanted")
    watch = asyncio.create_task(note_long_waits(log, track.directory("patient"), clock))
    await until(lambda: clock.now > 3 * LONG_S, "three hours")
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    (said,) = [event for event in log.events if event.kind == "no-capacity"]
    assert said.detail == {"hours": 1.0, "why": []}
    assert LONG_S <= said.time < 2 * LONG_S
