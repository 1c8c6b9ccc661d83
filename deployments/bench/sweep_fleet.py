"""A sweep in a simulated fleet: the product's queue, search, leases and pool; training is arithmetic.

Slices are kept by the product's keeper, as for a pool with `min_slices`; in a sweep without it, trials that wait make
them. A trial waits for a chip, trains, and waits again when its host has stopped, as a run's driver does. What takes a
driver its real time (opening a run, SSH, the start of a process) is in `Work.start_s`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from deployments.bench.fleet_pool import POOL, Book, train_on
from deployments.bench.fleet_runs import Run, Work
from tpu.clock import Clock
from tpu.emulator.simulation import Simulation
from tpu.runs.membership import Membership
from tpu.runs.placing import FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_GROWTH, MADE_LOOK_S
from tpu.slices.candidate import Candidate
from tpu.slices.lease import Lease, LeaseRefused, LeaseState
from tpu.slices.lease_book import Kept
from tpu.slices.pool import Take, Wanted
from tpu.sweeps.book import SweepBook
from tpu.sweeps.config import Search
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.pruning import Judge
from tpu.sweeps.queue import Queue, Running
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import Trial
from tpu.sweeps.wishes import WishBox, Wishes


class MeteredBook(Book):
    """Leases that are watched: how much of the chips' time is used, and how long a free one waits for the next trial.

    Both count only while `waits` says that somebody would take a chip.
    """

    def __init__(self, clock: Clock, waits: Callable[[], bool]) -> None:
        super().__init__()
        self.leased_s = self.used_s = (
            0.0  # chip seconds of slices that may be used, and of chips that are held
        )
        self.refills_s: list[float] = []
        self._clock, self._waits = clock, waits
        self._at = 0.0
        self._chips: dict[str, int] = {}
        self._used: dict[str, frozenset[int]] = {}
        self._free_since: dict[tuple[str, int], float] = {}

    async def create(self, lease: Lease) -> Kept:
        self._see(lease)
        return await super().create(lease)

    async def change(self, lease: Lease, generation: int) -> Kept:
        kept = await super().change(lease, generation)
        self._see(kept.lease)
        return kept

    def move(self) -> None:
        """Count what has passed since the last change."""
        now = self._clock.monotonic()
        if self._waits():
            self.leased_s += (now - self._at) * sum(self._chips.values())
            self.used_s += (now - self._at) * sum(map(len, self._used.values()))
        else:
            self._free_since.clear()
        self._at = now

    def _see(self, lease: Lease) -> None:
        self.move()
        name, usable = lease.slice, lease.state is LeaseState.READY
        used = frozenset(chip for holder in lease.holders for chip in holder.chips) if usable else frozenset()
        before = self._used.pop(name, frozenset())
        known = name in self._chips
        if not usable:
            self._chips.pop(name, None)
            self._free_since = {key: at for key, at in self._free_since.items() if key[0] != name}
            return
        self._chips[name], self._used[name] = lease.chips, used
        freed = set(range(lease.chips)) - used if not known else before - used
        for chip in used - before:
            if (since := self._free_since.pop((name, chip), None)) is not None:
                self.refills_s.append(self._at - since)
        self._free_since |= {(name, chip): self._at for chip in freed}


class BookInMemory(SweepBook):
    """What the bucket would know of the sweep; its time is measured by the live part."""

    def __init__(self) -> None:
        super().__init__("memory")

    def trials(self) -> list[Trial]:
        return []

    def outcomes(self) -> dict[int, Outcome]:
        return {}

    def begin(self, trial: Trial) -> None: ...

    def settle(self, trial: Trial, outcome: Outcome) -> None: ...


class NoWishes(WishBox):
    """Nobody steers this sweep."""

    def __init__(self) -> None:
        super().__init__("memory")

    def read(self) -> Wishes:
        return self.wishes

    def change(self, change: Callable[[Wishes], Wishes]) -> Wishes:
        return self.wishes

    def give_back(self) -> bool:
        return True


@dataclass
class SimulatedSweep:
    """`runs` fills as trials begin; each trains for `trial_s` in `segments`."""

    simulation: Simulation
    search: Search
    candidates: Sequence[Candidate]
    places: int
    trial_s: float
    segments: int
    runs: list[Run] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # from wanting a chip to having it
    attempts: int = 0
    most_live: int = 0
    _waiting: int = 0
    _queue: Queue | None = None

    @property
    def work(self) -> Work:
        return Work(checkpoint_s=self.trial_s / self.segments)

    def waits(self) -> bool:
        """Whether a free chip would be taken."""
        return self._queue is not None and (self._waiting > 0 or self._queue.left > 0)

    async def serve(self, book: Book, unfinished: Callable[[int], None]) -> None:
        with TemporaryDirectory() as folder:
            searcher = Searcher(self.search, "bench", f"sqlite:///{folder}/study.db")
            judge = Judge(None, "bench", self.search.metric)
            queue = Queue(
                "bench", self.search, BookInMemory(), searcher, judge, NoWishes(), lambda text: None
            )
            self._queue = queue

            def train(
                batch: Sequence[Running], pack: Sequence[Trial], hands_on: Callable[[], bool]
            ) -> Sequence[Coroutine[Any, Any, Outcome]]:
                return [self._train(book, one, hands_on) for one in batch]

            async def places() -> int:
                unfinished(self.search.runs - len(queue.board.ended))
                self.most_live = max(self.most_live, len(queue.board.live))
                return self.places

            async def changed() -> None: ...

            await queue.carry(train, places, changed)
            unfinished(0)

    async def _train(self, book: Book, running: Running, hands_on: Callable[[], bool]) -> Outcome:
        trial, course = running.trial, running.course
        run, clock = Run(trial.run, self.trial_s), self.simulation.clock
        self.runs.append(run)
        course.borders = range(1, self.segments)
        wanted = Wanted(
            trial.run, trial.run, tuple(self.candidates), chips=1, since=clock.time(), can_create=()
        )
        member = Membership(book, POOL, wanted, clock, lambda text: None)
        member.start()
        finished, before, known = False, self.attempts, 0
        try:
            while not finished:
                lease = await self._place(member)
                running.live.placed = True
                self.attempts += 1
                finished = await train_on(self.simulation, book, lease, run, clock.monotonic(), self.work)
                reached = round(run.done_s / self.work.checkpoint_s)
                for border in range(known + 1, reached + 1):
                    course.logged(border, trial.parameters["x"])
                    course.committed(border)
                known = reached
                if finished:
                    await member.part_with(lease.slice, clean=True, why="done", keep=hands_on())
                else:
                    await member.close(lease.slice, "its host has stopped")
        finally:
            await member.leave()
        run.finished = clock.monotonic()
        value = float(trial.parameters["x"])
        return Outcome("finished", value, (self.search.metric.name,), self.segments, self.attempts - before)

    async def _place(self, member: Membership) -> Lease:
        """Wait for a chip, looking as often as a driver does."""
        clock, pause = self.simulation.clock, FIRST_LOOK_S
        began = clock.monotonic()
        self._waiting += 1
        try:
            while True:
                decision = await member.decide(())
                if isinstance(decision, Take):
                    with contextlib.suppress(LeaseRefused):  # somebody was quicker
                        name = (await member.take(decision.parts[0])).slice
                        if (lease := await self._made(member, name)) is not None:
                            self.waits_s.append(clock.monotonic() - began)
                            return lease
                await clock.sleep(pause)
                pause = min(pause * LOOK_GROWTH, LONGEST_LOOK_S)
        finally:
            self._waiting -= 1

    async def _made(self, member: Membership, name: str) -> Lease | None:
        """A slice of which chips were taken, once it is ready; None if it will not be."""
        while (lease := await member.read(name)) is not None and lease.open:
            if lease.state is LeaseState.READY:
                return lease
            await self.simulation.clock.sleep(MADE_LOOK_S)
        await member.release(name)
        return None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, seconds."""
    if len(values) < 2:
        return {}
    return {"median": round(median(values), 3), "p99": round(quantiles(values, n=100)[98], 3)}


def figures_of(sweep: SimulatedSweep, book: MeteredBook) -> dict[str, Any]:
    book.move()
    return {
        "busy_share": round(book.used_s / max(1e-9, book.leased_s), 4),
        "chip_free_s": spread(book.refills_s),
        "trial_waits_s": spread(sweep.waits_s),
        "attempts": sweep.attempts,
        "most_live": sweep.most_live,
        "bucket_asked": dict(book.asked),
    }
