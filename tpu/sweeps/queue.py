"""Carry a sweep to its end: as many trials at once as there are places, until there is no trial any more.

How a trial is trained is the caller's business; here is which one comes next, what is noted of it and when, and
whether the one that ends hands its chips on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from tpu.sweeps.board import Board, Live, mean_value, told
from tpu.sweeps.book import SweepBook
from tpu.sweeps.config import Search, SweepError
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import Trial, trial_name

# How often it is looked whether there are more places, or fewer.
LOOK_S = 5.0


class Train(Protocol):
    """Train one trial to its end. `hands_on` is asked once, when its gang has ended: whether another trial will take
    its chips. Raises nothing but a cancellation."""

    async def __call__(self, trial: Trial, live: Live, hands_on: Callable[[], bool]) -> Outcome: ...


class Queue:
    """The trials of one sweep. `board` always shows how they are."""

    def __init__(
        self, name: str, search: Search, book: SweepBook, searcher: Searcher, report: Callable[[str], None]
    ) -> None:
        self.board = Board(search.metric.name, search.metric.goal)
        self._name = name
        self._search = search
        self._book = book
        self._searcher = searcher
        self._report = report
        self._seeds: list[int | None] = [*search.seeds] or [None]
        self._waiting: deque[Trial] = deque()
        self._exhausted = False
        self._promised = 0
        self._places = 0
        self._running: dict[asyncio.Task[Outcome], Trial] = {}

    async def take_up(self, rerun_failed: bool = False) -> None:
        """Learn what an earlier start of the sweep has done: what has ended stays so, the rest goes on first."""
        trials = await asyncio.to_thread(self._book.trials)
        outcomes = await asyncio.to_thread(self._book.outcomes)
        for trial in trials:
            self.board.began[trial.number] = trial
            if trial.number % len(self._seeds) == 0:
                await asyncio.to_thread(self._searcher.replay, trial.parameters)
            outcome = outcomes.get(trial.number)
            if outcome is not None and not (rerun_failed and outcome.state != "finished"):
                self.board.ended[trial.number] = outcome
                await self._tell(trial)
            else:
                self._waiting.append(trial)
        if trials:
            told = f"{len(self.board.ended)} trial(s) have ended, {len(self._waiting)} go on"
            self._report(f"taking the sweep {self._name} up: {told}")

    async def carry(
        self, train: Train, places: Callable[[], Awaitable[int]], changed: Callable[[], Awaitable[None]]
    ) -> None:
        """Return when every trial has ended.

        `places` says how many trials may train now; `changed` hears that the board is another one.

        Raises:
            SweepError: no trial logs the metric.
        """
        try:
            while True:
                self._places = await places()
                while len(self._running) < self._places and (trial := await self._next()) is not None:
                    self._start(train, trial)
                await changed()
                if not self._running:
                    return
                done, _ = await asyncio.wait(
                    self._running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    await self._settle(self._running.pop(task), task.result())
        finally:
            for task in self._running:
                task.cancel()
            # Each cleans up after itself, and that is waited for.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self, train: Train, trial: Trial) -> None:
        live = self.board.live[trial.number] = Live()
        promised = False

        def hands_on() -> bool:
            nonlocal promised
            if len(self._running) <= self._places and self.left > self._promised:
                self._promised += 1
                promised = True
            return promised

        def ended(_: object) -> None:
            if promised:
                self._promised -= 1

        task = asyncio.create_task(train(trial, live, hands_on))
        task.add_done_callback(ended)
        self._running[task] = trial
        self._report(f"trial {trial.number}, {told(trial.parameters, trial.seed)}: {trial.run}")

    @property
    def left(self) -> int:
        """How many trials are still to be started, as far as is known."""
        if self._exhausted:
            return len(self._waiting)
        return len(self._waiting) + self._search.runs - len(self.board.began)

    async def _next(self) -> Trial | None:
        if self._waiting:
            return self._waiting.popleft()
        number = len(self.board.began)
        if self._exhausted or number >= self._search.runs:
            return None
        seeds = len(self._seeds)
        if number % seeds:  # the next seed of the same point
            before = self.board.began[number - 1]
            point, parameters = before.point, dict(before.parameters)
        else:
            found = await asyncio.to_thread(self._searcher.next)
            if found is None:
                self._exhausted = True
                if number < self._search.runs:
                    self._report(
                        f"the space has no other point: {number} trials in place of {self._search.runs}"
                    )
                return None
            point, parameters = number // seeds, found
        seed = self._seeds[number % seeds]
        trial = Trial(number, point, parameters, seed, trial_name(self._name, parameters, seed))
        await asyncio.to_thread(self._book.begin, trial)
        self.board.began[number] = trial
        return trial

    async def _settle(self, trial: Trial, outcome: Outcome) -> None:
        self.board.live.pop(trial.number, None)
        self.board.ended[trial.number] = outcome
        await asyncio.to_thread(self._book.settle, trial, outcome)
        await self._tell(trial)
        value = "" if outcome.value is None else f", {self._search.metric.name} {outcome.value:.6g}"
        why = f": {outcome.reason}" if outcome.reason else ""
        self._report(f"trial {trial.number} {outcome.state}{value}{why}")
        self._refuse_unlogged(trial, outcome)

    def _refuse_unlogged(self, trial: Trial, outcome: Outcome) -> None:
        """A metric that the first one to finish has never logged will not come of the others."""
        name = self._search.metric.name
        if outcome.state != "finished" or name in outcome.logged:
            return
        if any(name in one.logged for one in self.board.ended.values()):
            return
        logged = ", ".join(outcome.logged) or "nothing"
        raise SweepError(
            f"metric.name: {trial.run} has finished and never logged {name!r}; it logged {logged}. The other trials "
            "are stopped; name one of these, or let the program log it, and start a sweep of another name"
        )

    async def _tell(self, trial: Trial) -> None:
        """Tell the search of a point once all of its trials have ended."""
        first = trial.point * len(self._seeds)
        last = min(first + len(self._seeds), self._search.runs)
        numbers = range(first, last)
        if all(number in self.board.ended for number in numbers):
            value = mean_value(self.board.ended[number] for number in numbers)
            await asyncio.to_thread(self._searcher.tell, trial.parameters, value)
