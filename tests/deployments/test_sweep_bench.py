"""The sweep bench in short: all trials finish, nothing leaks, and it counts what it says that it counts."""

from __future__ import annotations

import asyncio

import pytest

from deployments.bench import sweep
from deployments.bench.sweep_fleet import MeteredBook
from tpu.emulator.simulation_clock import VirtualClock, run_virtual
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
