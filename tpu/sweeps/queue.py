"""Carry a sweep to its end: as many trials, or packs, at once as there are places, until there is no trial any more.

How a trial is trained is the caller's business; here is which one comes next, what is noted of it and when, when one is
stopped early, and whether the one that ends hands its chips on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from tpu.checkpoint.retry import StorageUnavailable
from tpu.runs.tenure import StopRequested
from tpu.sweeps.board import Board, Live, mean_value, told
from tpu.sweeps.book import SweepBook
from tpu.sweeps.config import Search, SweepError
from tpu.sweeps.course import Course, TrialPruned
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.packing import together
from tpu.sweeps.points import Points
from tpu.sweeps.pruning import Judge
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import Trial, trial_name
from tpu.sweeps.wishes import WishBox, Wishes

# How often it is looked whether there are more places, or fewer, and what people wish.
LOOK_S = 5.0
_CANCELLED = "cancelled by request"


@dataclass
class Running:
    """A trial between its begin and its end. `gang` counts the gangs: trials of a pack have the same one."""

    trial: Trial
    live: Live
    course: Course
    gang: int


class Train(Protocol):
    """Train trials by one gang, each to its end or to the one that its course is given: an outcome of each, in order.

    Several are of one pack, of which `pack` are all trials, also those that take no part any more. `hands_on` is asked
    once, when the gang has ended: whether another one will take its chips. Outcomes raise nothing but a cancellation.
    """

    def __call__(
        self, batch: Sequence[Running], pack: Sequence[Trial], hands_on: Callable[[], bool]
    ) -> Sequence[Coroutine[Any, Any, Outcome]]: ...


class Queue:
    """The trials of one sweep. `board` always shows how they are; `priority` is what people wish it to be."""

    def __init__(
        self,
        name: str,
        search: Search,
        book: SweepBook,
        searcher: Searcher,
        judge: Judge,
        wishes: WishBox,
        report: Callable[[str], None],
    ) -> None:
        self.board = Board(search.metric.name, search.metric.goal)
        self.priority: int | None = None
        self.again: set[int] = set()  # trials that had failed or were stopped, and go on
        self._name = name
        self._search = search
        self._book = book
        self._searcher = searcher
        self._judge = judge
        self._box = wishes
        self._report = report
        self._points = Points(search, searcher)
        self._heard: list[tuple[Trial, int]] = []  # trials and steps that the study has not got yet
        self._waiting: deque[Trial] = deque()
        self._cancelled: set[int] = set()
        self._added = 0
        self._promised = 0
        self._places = 0
        self._gangs = 0  # so many have begun
        self._running: dict[asyncio.Task[Outcome], Running] = {}
        self._freed = asyncio.Event()  # some chips are, or a trial has ended

    async def take_up(self, rerun_failed: bool = False) -> None:
        """Learn what an earlier start of the sweep has done: what has ended stays so, the rest goes on first."""
        trials = await asyncio.to_thread(self._book.trials)
        outcomes = await asyncio.to_thread(self._book.outcomes)
        await asyncio.to_thread(self._points.recall, trials)
        for trial in trials:
            self.board.began[trial.number] = trial
            self._judge.begin(trial.number)
        for trial in trials:
            outcome = outcomes.get(trial.number)
            if outcome is None or (rerun_failed and outcome.state in ("failed", "stopped")):
                self._waiting.append(trial)
                self.again |= {trial.number} if outcome is not None else set()
                continue
            self.board.ended[trial.number] = outcome
            for step, value in outcome.reports:
                self._judge.hear(trial.number, step, value)
                self._heard.append((trial, step))
            self._judge.end(trial.number, outcome.state)
        for trial in trials:
            await self._tell(trial)

        def taken(wishes: Wishes) -> Wishes:
            left = tuple(number for number in wishes.cancelled if number not in self.again)
            return replace(wishes, taken=True, cancelled=left)

        await asyncio.to_thread(self._box.change, taken)
        await self._obey(self._box.wishes)
        if trials:
            told = f"{len(self.board.ended)} trial(s) have ended, {len(self._waiting)} go on"
            self._report(f"taking the sweep {self._name} up: {told}")

    async def carry(
        self, train: Train, places: Callable[[], Awaitable[int]], changed: Callable[[], Awaitable[None]]
    ) -> None:
        """Return when every trial has ended.

        `places` says how many gangs may train now; `changed` hears that the board is another one.

        Raises:
            SweepError: no trial logs the metric.
        """
        try:
            while True:
                self._places = await places()
                while len(self._training) < self._places and (batch := await self._next_batch()):
                    self._start(train, batch)
                await self._tell_reports()
                await changed()
                if not self._running and await asyncio.to_thread(self._box.give_back):
                    return
                if self._running:
                    await self._wait()
                await self._look_at_wishes()
        finally:
            for task in self._running:
                task.cancel()
            # Each cleans up after itself, and that is waited for.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._running, return_exceptions=True)
            self.board.live.clear()  # what has not ended waits for the next start

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), LOOK_S)
        self._freed.clear()
        for task in [one for one in self._running if one.done()]:
            running = self._running.pop(task)
            await self._settle(running, task.result())

    @property
    def _training(self) -> set[int]:
        """The gangs that need their chips."""
        return {running.gang for running in self._running.values() if not running.live.freed}

    @property
    def _unplaced(self) -> int:
        """How many gangs have yet to get their chips, as far as is known."""
        lives = {running.gang: running.live for running in self._running.values() if not running.live.freed}
        begun = sum(not live.placed for live in lives.values())
        return begun + -(-self.left // (self._search.pack or 1))

    def _start(self, train: Train, trials: Sequence[Trial]) -> None:
        self._gangs += 1
        batch = [self._begin(trial, self._gangs) for trial in trials]
        pack = together(self.board.began.values(), trials[0].pack) if trials[0].pack is not None else []
        left, promised = {trial.number for trial in trials}, False

        def hands_on() -> bool:
            nonlocal promised
            if len(self._training) <= self._places and self._unplaced > self._promised:
                self._promised += 1
                promised = True
            return promised

        def free(number: int) -> None:
            nonlocal promised
            left.discard(number)
            if promised and not left:
                self._promised -= 1
                promised = False
            self._freed.set()

        for running, outcome in zip(batch, train(batch, pack, hands_on), strict=True):
            number = running.trial.number
            running.live.on_free = partial(free, number)
            task = asyncio.create_task(outcome)
            task.add_done_callback(lambda _, number=number: free(number))
            self._running[task] = running

    def _begin(self, trial: Trial, gang: int) -> Running:
        live = self.board.live[trial.number] = Live()
        self._judge.begin(trial.number)
        course = Course(self._search.metric, lambda step, value: self._hear(trial, course, step, value))
        where = "" if trial.pack is None else f", in pack {trial.pack}"
        self._report(f"trial {trial.number}, {told(trial.parameters, trial.seed)}: {trial.run}{where}")
        return Running(trial, live, course, gang)

    def _hear(self, trial: Trial, course: Course, step: int, value: float) -> None:
        """A value at a border: whether the trial goes on is decided at once."""
        self._heard.append((trial, step))
        if (why := self._judge.hear(trial.number, step, value)) is not None:
            course.end(TrialPruned(why))

    @property
    def left(self) -> int:
        """How many trials are still to be started, as far as is known."""
        return len(self._waiting) + self._points.left

    async def _next_batch(self) -> list[Trial]:
        """What the next gang trains; nothing if there is no trial any more."""
        waiting: list[Trial] = []
        while self._waiting and (not waiting or self._with(waiting[0], self._waiting[0])):
            trial = self._waiting.popleft()
            if trial.number not in self._cancelled:
                waiting.append(trial)
            else:
                await self._note(trial, Outcome("stopped", reason=_CANCELLED))
        if waiting:
            return waiting
        pack: int | None = None
        if self._search.pack is not None:
            begun = [trial.pack for trial in self.board.began.values() if trial.pack is not None]
            pack = max(begun, default=-1) + 1
        drawn: list[Trial] = []
        while len(drawn) < (self._search.pack or 1) and (trial := await self._draw(pack)) is not None:
            drawn.append(trial)
        return drawn

    def _with(self, one: Trial, other: Trial) -> bool:
        """Whether a trial goes on with another one: a pack stays as it was, for the same bits."""
        return one.pack is not None and one.pack == other.pack

    async def _draw(self, pack: int | None) -> Trial | None:
        known = self._points.exhausted
        draft = await asyncio.to_thread(self._points.next)
        if self._points.exhausted and not known:
            self._report(f"the space has no other point: {len(self.board.began)} trials in all")
        if draft is None:
            return None
        name = trial_name(self._name, draft.parameters, draft.seed)
        number = len(self.board.began)
        trial = Trial(number, draft.point, draft.parameters, draft.seed, name, draft.added, pack)
        await asyncio.to_thread(self._book.begin, trial)
        self.board.began[number] = trial
        self._points.begin(trial)
        return trial

    async def _settle(self, running: Running, outcome: Outcome) -> None:
        trial = running.trial
        self.board.live.pop(trial.number, None)
        outcome = replace(outcome, reports=self._judge.heard(trial.number))
        await self._note(trial, outcome)
        self._refuse_unlogged(trial, outcome)

    async def _note(self, trial: Trial, outcome: Outcome) -> None:
        """Write down how a trial has ended, and let the search know."""
        self.board.ended[trial.number] = outcome
        self._judge.end(trial.number, outcome.state)
        await asyncio.to_thread(self._book.settle, trial, outcome)
        await self._tell(trial)
        value = "" if outcome.value is None else f", {self._search.metric.name} {outcome.value:.6g}"
        why = f": {outcome.reason}" if outcome.reason else ""
        self._report(f"trial {trial.number} {outcome.state}{value}{why}")

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
        numbers = [one.number for one in self._points.of(trial.point)]
        if not self._points.complete(trial.point) or any(n not in self.board.ended for n in numbers):
            return
        await self._tell_reports()
        outcomes = [self.board.ended[number] for number in numbers]
        pruned = any(one.state == "pruned" for one in outcomes)
        await asyncio.to_thread(self._searcher.tell, trial.parameters, mean_value(outcomes), pruned)

    async def _tell_reports(self) -> None:
        """What trials have reported goes to the study: the mean of a point's seeds, once all have come so far."""
        # All that was heard is looked at before anything is awaited, so that a step is complete once.
        heard = {(trial.point, step): trial.parameters for trial, step in self._heard}
        self._heard.clear()
        whole: list[tuple[Mapping[str, Any], int, float]] = []
        for (point, step), parameters in heard.items():
            reports = [self._judge.value(one.number, step) for one in self._points.of(point)]
            values = [value for value in reports if value is not None]
            if self._points.complete(point) and len(values) == len(reports):
                whole.append((parameters, step, sum(values) / len(values)))
        for parameters, step, mean in whole:
            await asyncio.to_thread(self._searcher.report, parameters, step, mean)

    # --- what people wish ---

    async def _look_at_wishes(self) -> None:
        try:
            wishes = await asyncio.to_thread(self._box.read)
        except StorageUnavailable as error:
            self._report(f"the bucket does not answer; trying again ({error})")
            return
        await self._obey(wishes)

    async def _obey(self, wishes: Wishes) -> None:
        if wishes.runs is not None and wishes.runs > self._points.limit:
            self._points.limit = wishes.runs
            self._report(f"at most {wishes.runs} trials are drawn now")
        for number, parameters in list(enumerate(wishes.added))[self._added :]:
            self._added = number + 1
            if not await asyncio.to_thread(self._points.add, number, parameters):
                self._report(f"there is a trial with {told(parameters, None)} already: nothing is added")
        if wishes.priority is not None and wishes.priority != self.priority:
            self.priority = wishes.priority
            self._report(f"its priority is {wishes.priority} now")
            for running in self._running.values():
                running.course.set_priority(wishes.priority)
        self._cancelled = set(wishes.cancelled)
        for running in self._running.values():
            if running.trial.number in self._cancelled:
                running.course.end(StopRequested(_CANCELLED))
