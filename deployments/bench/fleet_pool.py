"""Ours in a simulated fleet: the product's keeper, leases, zone health and creation rate, and runs that share slices.

The keeper is killed again and again: it loses all that it has in memory, and calls on their way are never answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from deployments.bench.fleet_runs import Run, Stay, Work, kept_s
from tpu.clock import sleep_unless
from tpu.cloud import TpuCloud
from tpu.emulator.simulation import Simulation
from tpu.emulator.simulation_clock import account
from tpu.emulator.simulation_hosts import ScriptedHost
from tpu.hosts.gang import SILENCE_S
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.keeper import Keeper
from tpu.slices.labels import ownership_labels
from tpu.slices.lease import Holder, Lease, LeaseRefused, LeaseState
from tpu.slices.lease_book import Kept, LeaseBook, MemoryLeaseBook, update
from tpu.slices.monitor import Monitor
from tpu.slices.pool import Part, Take, Wanted, assign
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_size import Option
from tpu.slices.project_memory import ProjectMemory, memory_of_process
from tpu.slices.request import SliceRequest
from tpu.topology import accelerator_type

POOL = "fleet"
# A dropped connection is known to be a lost host after so long.
DROPPED_S = 2.0
# Waiting runs look at the leases this often, and only when something has become free.
LOOK_EVERY_S = 5.0
# Half as often as a run looks at its own slice: a pool is in no such hurry, and a week takes half the time.
LIST_EVERY_S = 10.0
# A killed keeper is started again by Prefect after so long.
RESTART_S = 60.0


class Book(MemoryLeaseBook):
    """The leases as a bucket would hold them; counts what a bucket would be asked, and wakes who waits for chips."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.freed = asyncio.Event()

    async def list(self, pool: str, *, past: bool = False) -> list[Kept]:
        self.asked["list"] += 1
        return await super().list(pool, past=past)

    async def read(self, pool: str, slice: str) -> Kept | None:
        self.asked["read"] += 1
        return await super().read(pool, slice)

    async def create(self, lease: Lease) -> Kept:
        self.asked["write"] += 1
        return await super().create(lease)

    async def change(self, lease: Lease, generation: int) -> Kept:
        self.asked["write"] += 1
        kept = await super().change(lease, generation)
        if lease.state is LeaseState.READY and lease.free_chips:
            self.freed.set()
        return kept


class Mortal:
    """Somebody's only way to the world: once it is cut, no call is answered any more."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = None if self.cut else await method(*args, **kwargs)
            if self.cut:
                await asyncio.Event().wait()
            return answer

        return call


@dataclass
class Keepers:
    """One keeper after the other. `kill_every_s` None: one for all time."""

    simulation: Simulation
    book: LeaseBook
    options: Sequence[Option]
    request: SliceRequest
    kill_every_s: float | None = None
    memory: ProjectMemory = field(init=False)
    keeper: Keeper | None = None
    kills: int = 0
    _wanted: int = 0
    _dead: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = memory_of_process(self.simulation.clock)

    def want(self, count: int) -> None:
        self._wanted = count
        if self.keeper is not None:
            self.keeper.want(count)

    async def run(self) -> None:
        for number in itertools.count():
            cloud, book = Mortal(self.simulation.cloud), Mortal(self.book)
            monitor = Monitor(cast(TpuCloud, cloud), self.simulation.clock, LIST_EVERY_S)
            self.keeper = Keeper(
                pool=POOL, options=self.options, request=self.request, cloud=cast(TpuCloud, cloud),
                book=cast(LeaseBook, book), memory=self.memory, monitor=monitor, clock=self.simulation.clock,
                uid=f"keeper-{number}", report=lambda text: None,
            )  # fmt: skip
            self.keeper.want(self._wanted)
            task = asyncio.create_task(self.keeper.run())
            await asyncio.wait([task], timeout=self.kill_every_s)
            if task.done():
                task.result()  # a keeper ends by a bug alone
            cloud.cut = book.cut = True
            task.cancel()  # it is not waited for: it may be in the middle of a call that is never answered
            self._dead += [task, asyncio.create_task(monitor.close())]
            self.kills += 1
            await self.simulation.clock.sleep(RESTART_S)


class Queue:
    """Runs that wait for a chip, and those that train."""

    def __init__(
        self,
        simulation: Simulation,
        book: Book,
        candidates: Sequence[Candidate],
        runs: Sequence[Run],
        work: Work,
        changed: Callable[[int], None],
    ) -> None:
        """`changed` is told how many runs there are that are not finished."""
        self._simulation = simulation
        self._clock = simulation.clock
        self._book = book
        self._candidates = tuple(candidates)
        self._work = work
        self._changed = changed
        self._runs = {run.name: run for run in runs}
        self._waiting = {run.name: self._wanted(run, float(number)) for number, run in enumerate(runs)}
        self._unfinished = len(runs)
        self.finished = asyncio.Event()

    def _wanted(self, run: Run, since: float) -> Wanted:
        return Wanted(run.name, run.name, self._candidates, chips=1, since=since, can_create=())

    async def serve(self) -> None:
        """Give out what becomes free, until all runs are finished."""
        self._changed(self._unfinished)
        async with asyncio.TaskGroup() as training:
            await self._give_out(training)

    async def _give_out(self, training: asyncio.TaskGroup) -> None:
        while not self.finished.is_set():
            await sleep_unless(self._clock, LOOK_EVERY_S * 1000, self._book.freed, self.finished)
            self._book.freed.clear()
            kept = await self._book.list(POOL)
            ready = [one.lease for one in kept if one.lease.state is LeaseState.READY]
            free = sum(len(lease.free_chips) for lease in ready)
            # All ask for the same: who comes later in line than there are chips gets none.
            head = heapq.nsmallest(free, self._waiting.values(), key=lambda wanted: wanted.since)
            for uid, decision in assign(head, ready, PoolSettings()).items():
                if isinstance(decision, Take):
                    del self._waiting[uid]
                    training.create_task(self._stay(self._runs[uid], decision.parts[0]))
            await self._clock.sleep(LOOK_EVERY_S)

    async def _stay(self, run: Run, part: Part) -> None:
        """One attempt of a run on one chip, from taking it to giving it back."""
        begin, ended_well = self._clock.monotonic(), False
        holder = Holder(run.name, run.name, part.chips)
        with contextlib.suppress(LeaseRefused):  # the slice went in between
            kept = await update(
                self._book, POOL, part.slice, lambda lease: leases.take(lease, holder, self._now())
            )
            ended_well = await train_on(self._simulation, self._book, kept.lease, run, begin, self._work)
            with contextlib.suppress(LeaseRefused):
                await update(
                    self._book, POOL, part.slice, lambda lease: leases.release(lease, run.name, self._now())
                )
        if ended_well:
            run.finished = self._clock.monotonic()
            self._unfinished -= 1
            self._changed(self._unfinished)
            if not self._unfinished:
                self.finished.set()
        else:
            self._waiting[run.name] = self._wanted(run, begin)
            self._book.freed.set()

    def _now(self) -> float:
        return self._clock.time()


async def train_on(
    simulation: Simulation, book: LeaseBook, lease: Lease, run: Run, begin: float, work: Work
) -> bool:
    """Train until the run is finished or the host stops; False if the rest has to be trained elsewhere.

    The chip was taken at `begin`. A host that falls silent makes its slice one that nobody takes any more.
    """
    clock = simulation.clock

    def noted(kept: float) -> bool:
        return run.keep(Stay(run.name, lease.slice, begin, clock.monotonic(), kept))

    node = simulation.node(lease.candidate.zone, lease.slice)
    if node is None or not node.hosts:
        await clock.sleep(DROPPED_S)
        return noted(0.0)
    host = cast(ScriptedHost, node.hosts[0])
    first_step = begin + host.ssh_s + work.start_s
    stopped = asyncio.Event()
    host.on_stop.append(stopped.set)
    try:
        if host.works:
            await sleep_unless(clock, first_step + run.left_s - begin, stopped)
    except asyncio.CancelledError:  # the time of the simulation is over
        noted(kept_s(run, host, first_step, clock.monotonic(), work))
        raise
    host.on_stop.remove(stopped.set)
    kept = kept_s(run, host, first_step, clock.monotonic(), work)
    if host.works:
        return noted(kept)
    await clock.sleep(DROPPED_S if host.dead_at is not None else SILENCE_S)
    if host.dead_at is None:
        await update(book, POOL, lease.slice, lambda one: leases.quarantine(one, "silent"))
    return noted(kept)


# Lets all runs train in the pool of a book; how many are not finished is told.
Serve = Callable[[Book, Callable[[int], None]], Coroutine[Any, Any, None]]


class PoolController:
    """The pool with its keepers and runs, as one thing to be played."""

    def __init__(
        self,
        simulation: Simulation,
        options: Sequence[Option],
        size: int,
        kill_every_s: float | None,
        book: Book,
        serve: Serve,
    ) -> None:
        first = options[0].candidate
        request = SliceRequest(first.zone, first.accelerator_type, labels=ownership_labels(POOL, "keeper"))
        self._size = size
        self._chips = accelerator_type(first.accelerator_type).chips
        self.book = book
        self.keepers = Keepers(simulation, self.book, options, request, kill_every_s)
        self._serve = serve

    def _want(self, unfinished: int) -> None:
        self.keepers.want(min(self._size, math.ceil(unfinished / self._chips)))

    async def run(self) -> None:
        """Train all runs, and end when the pool is empty again."""
        settings = PoolSettings(idle_minutes=10, max_slices=self._size)
        await self.book.set_settings(POOL, lambda _: settings)
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self.keepers.run())
            await account("runs", self._serve(self.book, self._want))
            while await MemoryLeaseBook.list(self.book, POOL):
                await self.keepers.simulation.clock.sleep(LOOK_EVERY_S)
            keeping.cancel()

    async def known(self, zone: str, name: str) -> bool:
        kept = await MemoryLeaseBook.read(self.book, POOL, name)
        return kept is not None and kept.lease.state is not LeaseState.GONE

    async def candidates(self) -> dict[str, Candidate]:
        """What each slice was, by name."""
        return {one.lease.slice: one.lease.candidate for one in await self.book.list(POOL, past=True)}
