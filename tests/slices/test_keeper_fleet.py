"""Keepers on simulated fleets: rough weather, keepers that die, runs that come and go, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_weather import CallWeather, HostWeather, PlaceWeather, Weather
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.keeper import Keeper
from tpu.slices.labels import ownership_labels
from tpu.slices.lease import Holder, LeaseRefused, LeaseState
from tpu.slices.lease_book import MemoryLeaseBook, update
from tpu.slices.monitor import Monitor
from tpu.slices.pool_size import Option
from tpu.slices.project_memory import memory_of_process
from tpu.slices.request import SliceRequest

POOL, KIND, HOUR = "kept", "v6e-4", 3600.0
ZONES = ("us-east1-d", "us-east5-a", "europe-west4-a")
CANDIDATES = [Candidate(zone, KIND, "spot", 1.0) for zone in ZONES]
ROUGH = Weather(
    calls=CallWeather(error_share=0.02),
    hosts=HostWeather(mean_life_s=HOUR),
    places=PlaceWeather(every_s=2 * HOUR, lasts_s=HOUR / 2, takes_share=0.5),
)


class Deletions:
    """The cloud, but no slice may be deleted that somebody holds or can take."""

    def __init__(self, cloud: Any, book: MemoryLeaseBook) -> None:
        self._cloud = cloud
        self._book = book
        self.seen = 0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._cloud, method)

    async def delete_queued_resource(self, zone: str, name: str) -> None:
        kept = await self._book.read(POOL, name)
        assert kept is not None
        assert not kept.lease.holders
        assert not kept.lease.open
        self.seen += 1
        await self._cloud.delete_queued_resource(zone, name)


class Fleet:
    """A simulated pool: its book outlives its keepers."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.clock = simulation.clock
        self.book = MemoryLeaseBook()
        self.cloud = Deletions(simulation.cloud, self.book)
        self.memory = memory_of_process(self.clock)
        self.uids = itertools.count()

    @contextlib.asynccontextmanager
    async def kept(self, wanted: int):
        monitor = Monitor(self.cloud, self.clock, every_s=10.0)  # type: ignore[arg-type]
        keeper = Keeper(
            pool=POOL, options=[Option(candidate) for candidate in CANDIDATES], book=self.book,
            cloud=self.cloud,  # type: ignore[arg-type]
            request=SliceRequest(ZONES[0], KIND, labels=ownership_labels(POOL, "keeper")), memory=self.memory,
            monitor=monitor, clock=self.clock, uid=f"keeper-{next(self.uids)}", report=lambda line: None,
        )  # fmt: skip
        keeper.want(wanted)
        task = asyncio.create_task(keeper.run())
        try:
            yield keeper
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await monitor.close()

    async def ready(self) -> list[leases.Lease]:
        return [one.lease for one in await self.book.list(POOL) if one.lease.state is LeaseState.READY]

    async def until(self, condition: Callable[[], bool], within_s: float) -> None:
        end = self.clock.monotonic() + within_s
        while not condition():
            assert self.clock.monotonic() < end
            await self.clock.sleep(5.0)

    def in_the_cloud(self) -> int:
        return len(self.simulation.world.nodes) + len(self.simulation.world.queued)


async def run_after_run(fleet: Fleet, number: int, luck: random.Random) -> None:
    """A run takes a chip of any ready slice, uses it for a while, gives it back, or dies with it now and then."""
    for again in itertools.count():
        uid = f"run-{number}-{again}"
        for lease in await fleet.ready():
            with contextlib.suppress(LeaseRefused):
                chip = luck.randrange(4)
                await update(
                    fleet.book, POOL, lease.slice,
                    lambda now, uid=uid, chip=chip: leases.take(now, Holder(uid, uid, (chip,)), fleet.clock.time()),
                )  # fmt: skip
                await fleet.clock.sleep(luck.expovariate(1 / 900))
                if luck.random() < 0.1:
                    await update(fleet.book, POOL, lease.slice, lambda now: leases.quarantine(now, "sick"))
                await update(
                    fleet.book, POOL, lease.slice, lambda now, uid=uid: leases.release(now, uid, fleet.clock.time())
                )  # fmt: skip
                break
        await fleet.clock.sleep(30.0)


@pytest.mark.parametrize("seed", range(2))
def test_nothing_leaks_however_often_keepers_die(seed: int) -> None:
    async def story(simulation: Simulation) -> tuple[int, float]:
        fleet, luck = Fleet(simulation), random.Random(seed)
        simulation.let_stockouts_come([(zone, KIND) for zone in ZONES])
        runs = [asyncio.create_task(run_after_run(fleet, i, luck)) for i in range(20)]
        useful = looks = 0
        for _ in range(12):
            async with fleet.kept(luck.choice([4, 8, 12])):
                for _ in range(int(luck.expovariate(1 / 20)) + 1):
                    await simulation.clock.sleep(60.0)
                    useful, looks = useful + len(await fleet.ready()), looks + 1
            await simulation.clock.sleep(luck.expovariate(1 / 120))
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        async with fleet.kept(0):
            # The holders of the runs that were cut off are dropped for their silence only where a slice retires.
            for kept in await fleet.book.list(POOL):
                for holder in kept.lease.holders:
                    await update(
                        fleet.book, POOL, kept.lease.slice,
                        lambda now, uid=holder.uid: leases.release(now, uid, fleet.clock.time()),
                    )  # fmt: skip
            await fleet.until(lambda: fleet.in_the_cloud() == 0, 2 * HOUR)
            await simulation.clock.sleep(300.0)
            assert fleet.in_the_cloud() == 0
            assert await fleet.book.list(POOL) == []
        return fleet.cloud.seen, useful / looks

    deleted, mean_ready = simulate(story, seed=seed, weather=ROUGH)
    assert deleted > 10  # the weather was rough indeed
    assert mean_ready > 1.5


def test_a_fleet_costs_two_lists_a_zone_whatever_its_size() -> None:
    async def story(simulation: Simulation) -> tuple[float, float, float]:
        fleet = Fleet(simulation)
        async with fleet.kept(200):
            await simulation.clock.sleep(HOUR)
            ready = len(await fleet.ready())
            per_zone = simulation.calls.lists_a_minute(600.0)
            gets = simulation.calls.a_minute(600.0)["get"].mean
            return ready, max(calls.most for calls in per_zone.values()), gets

    fair = Weather(hosts=HostWeather(mean_life_s=6 * HOUR))
    ready, lists, gets = simulate(story, seed=1, weather=fair)
    assert ready >= 180
    assert lists <= 13
    assert gets < 60
