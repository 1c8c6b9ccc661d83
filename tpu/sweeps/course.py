"""The course of one trial: what it reports at its borders, and the word that ends it early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from tpu.sweeps.metric import Metric


class TrialPruned(Exception):
    """The trial fell behind and was stopped at a border; the message says behind what."""


class Course:
    """Between the one who trains the trial, who says what it logs, and the queue, which may end it.

    `borders` are the steps at which it is judged; None for a program without checkpoints of ours, each value of which
    is judged and counted. `report` gets the step (or the count) and the metric's value so far.
    """

    def __init__(self, metric: Metric, report: Callable[[int, float], None]) -> None:
        self.borders: Collection[int] | None = ()
        self.ended: Exception | None = None
        self._metric = metric
        self._report = report
        self._values: dict[int, float] = {}
        self._set_priority: Callable[[int], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._early = asyncio.get_running_loop().create_future()

    def logged(self, step: int, value: object) -> None:
        """The metric's value at a step, as the program logs it."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        self._values[step] = float(value)
        if self.borders is None:
            self._report(len(self._values), self._metric.of(self._values.values()))

    def resumed(self, step: int) -> None:
        """The program goes on from `step`: what it had logged behind is logged again."""
        self._values = {at: value for at, value in self._values.items() if at <= step}

    def committed(self, step: int) -> None:
        """Step `step` is safe; it is heard after the values up to it."""
        if self.borders is None or step not in self.borders:
            return
        if known := [value for at, value in self._values.items() if at <= step]:
            self._report(step, self._metric.of(known))

    def recall(self, rows: Iterable[Mapping[str, Any]], metric: str, commits: Iterable[int] = ()) -> None:
        """What an earlier driver of the trial has heard: the rows that it logged, as they are in the bucket."""
        for row in rows:
            self.logged(row["step"], row.get(metric))
        for step in sorted(commits):
            self.committed(step)

    def set_priority(self, priority: int) -> None:
        """The trial's priority in its pool is another one from now on."""
        if self._set_priority is not None:
            self._set_priority(priority)

    def on_priority(self, listener: Callable[[int], None]) -> None:
        self._set_priority = listener

    def end(self, why: Exception) -> None:
        """End the trial early; only the first word counts."""
        if self.ended is None:
            self.ended = why
            self._early.set_result(None)
            self._on_end()

    def on_end(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when it is ended early."""
        self._on_end = listener

    async def along(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, unless the trial is ended early.

        Raises:
            What `end` was given, once the work has been cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._early}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert self.ended is not None
            raise self.ended
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
