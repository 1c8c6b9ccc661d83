"""Many runs that acquire slices at once, for simulated hours, in a cloud that makes trouble: nothing may be left."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpu.cloud import CloudError
from tpu.emulator.capacity import Limits
from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_weather import CallWeather, HostWeather, Lognormal, PlaceWeather, Weather
from tpu.slices.acquire import Wish, acquire
from tpu.slices.candidate import Candidate
from tpu.slices.deletion import delete_slice
from tpu.slices.labels import ownership_labels
from tpu.slices.project_memory import ProjectMemory, memory_of_process
from tpu.slices.provision import NotReady, ReadySlice
from tpu.slices.request import SliceRequest

HOUR = 3600.0
KIND = "v6e-4"
CHEAP = Candidate("us-east1-d", KIND, "spot")
OTHER = Candidate("us-east5-a", KIND, "spot")
SMALL = Candidate("us-east5-b", KIND, "on-demand")  # two at a time
NONE = Candidate("europe-west4-a", KIND, "spot")  # no quota
ALL = (CHEAP, OTHER, SMALL, NONE)
LIMITS = Limits(quota={(SMALL.zone, KIND): 2, (NONE.zone, KIND): 0}, capacity={(CHEAP.zone, KIND): 6})
STORM = Weather(
    calls=CallWeather(error_share=0.02),
    hosts=HostWeather(boot=Lognormal(120.0, 1.0), mean_life_s=HOUR),
    places=PlaceWeather(every_s=HOUR, lasts_s=0.5 * HOUR, takes_share=0.5),
)


class Book:
    """Which slices of a run may be there."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.open: set[str] = set()
        self.count = 0

    async def intended(self, candidate: Candidate) -> str:
        self.count += 1
        name = f"{self.run}-{self.count}"
        self.open.add(name)
        await asyncio.sleep(0.05)  # as a bucket takes, in simulated seconds
        return name

    async def given_up(self, name: str, why: str) -> None:
        assert name in self.open

    async def ended(self, name: str, why: str, *, deleted: bool, preempted: bool) -> None:
        assert name in self.open
        if deleted:
            self.open.remove(name)


async def always() -> None:
    """Wanted."""


async def one_run(
    simulation: Simulation, memory: ProjectMemory, luck: random.Random, book: Book, begin_s: float
) -> str:
    """Acquire, hold for a while, delete; cancelled at times. Returns how it ended."""
    await simulation.clock.sleep(begin_s)
    candidates = tuple(luck.sample(ALL, luck.randint(1, 4)))
    request = SliceRequest(
        CHEAP.zone,
        KIND,
        labels=ownership_labels("sim", "pytest", book.run),
        deadline_s=luck.uniform(600, 2 * HOUR),
    )
    wish = Wish(candidates, request, race=luck.randint(1, 3), queue_patience_s=luck.choice([None, 300.0]))
    getting = asyncio.create_task(
        acquire(
            simulation.cloud, wish, book, memory, simulation.clock, lambda line: None, always,
            chance=random.Random(luck.random()), beside=simulation.world.background.start,
        )
    )  # fmt: skip
    if luck.random() < 0.3:
        await asyncio.wait({getting}, timeout=luck.expovariate(1 / 120))
        getting.cancel()
    try:
        ready: ReadySlice = await getting
    except asyncio.CancelledError:
        return "cancelled"
    except NotReady:
        return "too late"
    except CloudError:
        return "refused" if candidates == (NONE,) else "refused wrongly"
    # A deletion that the cloud has not confirmed in time stays in the book: a boot under way is let end first.
    assert ready.name in book.open
    assert candidate_of(ready) in candidates
    await simulation.clock.sleep(luck.expovariate(1 / HOUR))
    await delete_slice(simulation.cloud, ready.zone, ready.name, simulation.clock, HOUR)
    book.open.remove(ready.name)
    return "had"


def candidate_of(ready: ReadySlice) -> Candidate:
    request = ready.request
    return Candidate(ready.zone, request.accelerator_type, request.provisioning)


@settings(max_examples=1, deadline=None)
@given(st.integers(0, 10**6))
@example(1)  # a loser of a race boots for longer than its deletion is waited for
def test_whatever_the_cloud_does_nothing_is_left_and_nothing_is_made_unwritten(seed: int):
    async def story(simulation: Simulation) -> None:
        memory, luck = memory_of_process(simulation.clock), random.Random(seed)
        simulation.let_stockouts_come([(CHEAP.zone, KIND), (OTHER.zone, KIND)])
        books = [Book(f"r{number}") for number in range(16)]
        written: set[str] = set()

        async def watch() -> None:
            while True:
                there = {
                    name.rpartition("/")[2] for name in (*simulation.world.queued, *simulation.world.nodes)
                }
                open_ = {name for book in books for name in book.open}
                written.update(open_)
                assert there <= written
                await simulation.clock.sleep(1.0)

        watching = asyncio.create_task(watch())
        ends = await asyncio.gather(
            *(one_run(simulation, memory, luck, book, luck.uniform(0, 3 * HOUR)) for book in books)
        )
        assert not watching.done() or watching.result() is None
        watching.cancel()
        await simulation.clock.sleep(2 * HOUR)
        # Also those that were told as unconfirmed are gone by now, or the book names them.
        left = {name.rpartition("/")[2] for name in (*simulation.world.queued, *simulation.world.nodes)}
        assert left <= {name for book in books for name in book.open}
        assert left == set(), ends
        assert ends.count("had") >= 5
        assert "refused wrongly" not in ends
        assert (await memory.health()).of(NONE).no_quota == "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"
        calls = simulation.calls.a_minute()
        assert calls["create"].most <= 91

    simulate(story, seed=seed, weather=STORM, limits=LIMITS)


def test_V5_two_hundred_at_once_are_created_below_the_limit_and_none_is_refused():
    async def story(simulation: Simulation) -> tuple[float, int]:
        memory = memory_of_process(simulation.clock)
        books = [Book(f"r{number}") for number in range(200)]
        request = SliceRequest(OTHER.zone, KIND, labels=ownership_labels("sim", "pytest"), deadline_s=HOUR)

        async def get(book: Book) -> None:
            await acquire(
                simulation.cloud,
                Wish((OTHER,), request),
                book,
                memory,
                simulation.clock,
                lambda line: None,
                always,
            )

        await asyncio.gather(*map(get, books))
        assert all(book.count == 1 for book in books)
        return simulation.clock.monotonic(), simulation.calls.a_minute()["create"].most

    seconds, most = simulate(story, seed=1)
    assert most <= 91
    # At 70 a minute the last is sent after two and a half minutes; then it boots.
    assert 2.5 * 60 < seconds < 20 * 60


def test_V1_twenty_runs_find_out_together_that_a_place_is_sold_out_and_when_it_is_not():
    async def story(simulation: Simulation) -> None:
        memory, clock = memory_of_process(simulation.clock), simulation.clock
        where = (OTHER.zone, KIND)
        settings_ = simulation.world.settings
        simulation.world.settings = dataclasses.replace(
            settings_, limits=settings_.limits.with_stockout(where, True)
        )
        books = [Book(f"r{number}") for number in range(20)]
        request = SliceRequest(
            OTHER.zone, KIND, labels=ownership_labels("sim", "pytest"), deadline_s=5 * HOUR
        )
        waiting = [
            asyncio.create_task(
                acquire(
                    simulation.cloud, Wish((OTHER,), request), book, memory, clock, lambda line: None, always
                )
            )
            for book in books
        ]
        await clock.sleep(HOUR)
        first_wave = sum(book.count for book in books)
        # Those that were asked for before anybody knew, then one at a time: not 20 times as many as one run would.
        assert first_wave < 20 + 20
        simulation.world.settings = dataclasses.replace(
            settings_, limits=settings_.limits.with_stockout(where, False)
        )
        await asyncio.wait_for(asyncio.gather(*waiting), 0.5 * HOUR)
        assert sum(book.count for book in books) - first_wave <= 25

    simulate(story, seed=2)


@pytest.mark.slow  # as tests/emulator/test_simulation.py
def test_two_simulations_of_a_seed_have_the_same_history():
    async def story(simulation: Simulation) -> list[str]:
        memory, luck = memory_of_process(simulation.clock), random.Random(5)
        simulation.let_stockouts_come([(CHEAP.zone, KIND)])
        books = [Book(f"r{number}") for number in range(10)]
        return await asyncio.gather(
            *(one_run(simulation, memory, luck, book, luck.uniform(0, HOUR)) for book in books)
        )

    assert simulate(story, seed=5, weather=STORM, limits=LIMITS) == simulate(
        story, seed=5, weather=STORM, limits=LIMITS
    )


def test_V1_who_waits_for_the_answer_of_another_goes_on_when_it_is_a_success():
    async def story(simulation: Simulation) -> float:
        memory, clock = memory_of_process(simulation.clock), simulation.clock
        await memory.note(OTHER, "stockout", clock.time())
        await clock.sleep(300)
        request = SliceRequest(OTHER.zone, KIND, labels=ownership_labels("sim", "pytest"), deadline_s=HOUR)

        async def get(book: Book) -> float:
            wish = Wish((OTHER,), request)
            await acquire(simulation.cloud, wish, book, memory, clock, lambda line: None, always)
            return clock.monotonic()

        first, second = sorted(await asyncio.gather(get(Book("a")), get(Book("b"))))
        return second - first

    weather = Weather(hosts=HostWeather(boot=Lognormal(20.0, 0.01), ssh=Lognormal(1.0, 0.01)))
    # A boot and a look, not the minute that an answer may take.
    assert simulate(story, seed=3, weather=weather) < 50
