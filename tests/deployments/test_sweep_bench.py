"""The sweep bench in short: all trials finish, nothing leaks, and it counts what it says that it counts."""

from __future__ import annotations

import asyncio

import pytest

from deployments.bench import live_sweep, sweep
from deployments.bench.live_sweep import Live
from deployments.bench.sweep_fleet import MeteredBook
from deployments.bench.worker import Memory
from tpu.emulator.simulation_clock import VirtualClock, run_virtual
from tpu.runs.event_log import RunEvent
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.lease import Holder
from tpu.slices.lease_book import update


@pytest.mark.slow
def test_a_small_sweep_ends_with_every_trial_finished_and_nothing_left():
    found = sweep.fleet(steady=1, spots=1, trials=12, seed=2, trial_s=600.0)
    assert (found["runs_finished"], found["leaked_slice_hours"], found["left_in_cloud"]) == (12, 0.0, 0)
    assert 0.5 < found["busy_share"] <= 1.0
    assert found["most_live"] == 8
    assert 12 <= found["attempts"] < 24


def test_a_chip_counts_as_used_while_it_is_held_and_only_while_somebody_waits():
    waits = True

    async def story() -> MeteredBook:
        nonlocal waits
        clock = VirtualClock()
        book = MeteredBook(clock, lambda: waits)
        lease = leases.intend(
            "a", "fleet", Candidate("z", "v6e-4", "spot"), 4, "maker", clock.time(), None, ""
        )
        kept = await book.create(lease)
        await book.change(leases.admit(lease, kept.generation), kept.generation)
        await update(book, "fleet", "a", lambda one: leases.ready(one, clock.time()))
        await asyncio.sleep(2)  # of simulated time: four chips are free
        for chip in (0, 1):
            holder = Holder(f"run-{chip}", f"run-{chip}", (chip,))
            await update(book, "fleet", "a", lambda one, h=holder: leases.take(one, h, clock.time()))
        await asyncio.sleep(10)  # two are used
        await update(book, "fleet", "a", lambda one: leases.release(one, "run-0", clock.time()))
        waits = False
        await asyncio.sleep(100)
        book.move()
        return book

    book = run_virtual(story())
    assert (book.used_s, book.leased_s) == (20.0, 48.0)
    assert book.refills_s == [2.0, 2.0]


def history(*told: tuple[float, str, dict]) -> list[RunEvent]:
    return [RunEvent(*one) for one in told]


def test_a_refill_lasts_from_a_chip_being_given_back_to_the_next_trial_taking_it():
    maker = history(
        (0.0, "slice-ready", {"slice": "s"}),
        (1.0, "attempt-started", {"slice": "s"}),
        (10.0, "slice-released", {"slice": "s"}),
    )
    beside = history(
        (2.0, "slice-leased", {"slice": "s", "chips": [1]}),  # which nobody had before
        (3.0, "attempt-started", {"slice": "s"}),
        (20.0, "slice-released", {"slice": "s"}),
    )
    after = history(
        (10.5, "slice-leased", {"slice": "s", "chips": [0]}), (12.0, "attempt-started", {"slice": "s"})
    )
    assert live_sweep.refills([maker, beside, after]) == ([0.5], [2.0])


def test_a_trial_costs_what_the_larger_sweep_takes_more():
    small = Live(4, 8, Memory(100_000_000, 0, 1), 10.0, 60.0, [0.1, 0.2], [1.0, 2.0], {"Completed": 8})
    large = Live(8, 16, Memory(104_000_000, 0, 1), 18.0, 60.0, [0.2, 0.3], [1.0, 2.0], {"Completed": 15})
    found = live_sweep.figures_of(small, large)
    assert (found["mb_per_live_trial"], found["cpu_s_per_trial"]) == (1.0, 1.0)
    assert (found["records_complete"], found["most_live_trials"]) == (False, 8)
