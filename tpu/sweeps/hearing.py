"""What is heard of a trial while it trains, for the table and for its course."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tpu.checkpoint.fence import Fence
from tpu.runs.event_log import RunEvent
from tpu.runtime.metrics import read_logged, read_metrics
from tpu.sweeps.board import Live
from tpu.sweeps.course import Course
from tpu.sweeps.metric import drawn_by_step


class Hearing:
    """`commits` says whether the program commits checkpoints of ours; of another one values are counted."""

    def __init__(self, metric: str, live: Live, course: Course, commits: bool) -> None:
        self._metric = metric
        self._live = live
        self._course = course
        self._commits = commits
        # An attempt of a program without checkpoints of ours has begun and has logged nothing yet.
        self._begins = False

    async def recall(self, run_dir: str, fence: Fence, history: Sequence[RunEvent]) -> None:
        """What an earlier driver has heard of the run; `history` is its own, as it grows."""
        self._live.events = history
        rows: list[dict[str, Any]] = []
        if not self._commits and fence.attempt:
            rows = await asyncio.to_thread(read_logged, run_dir)
            self._course.recall(rows, self._metric)
        elif fence.commits:
            rows = await asyncio.to_thread(read_metrics, run_dir, fence)
            self._course.recall(rows, self._metric, (commit.step for commit in fence.commits))
        for row in rows:
            self._show(row)

    def hear(self, where: str, record: Mapping[str, Any]) -> None:
        """An event of the program on the host `where`."""
        match record["event"]:
            case "start" if not self._commits:
                self._begins = True
            case "logged":
                if self._begins:
                    self._course.resumed(record["step"] - 1)
                    self._begins = False
                self._live.step, self._live.where = record["step"], where
                self._value(record)
            case "restored":
                self._live.step = record["step"] or 0
                self._course.resumed(self._live.step)
            case "step":
                self._live.step, self._live.where = record["step"], where
                self._value(record)
            case "commit":
                self._course.committed(record["step"])

    def _value(self, record: Mapping[str, Any]) -> None:
        self._show(record)
        self._course.logged(record["step"], record.get(self._metric))

    def _show(self, record: Mapping[str, Any]) -> None:
        if isinstance(value := record.get(self._metric), int | float):
            self._live.value = value
        if isinstance(value := record.get(drawn_by_step(self._metric)), int | float):
            self._live.curve.add(record["step"], value)
