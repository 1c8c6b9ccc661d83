"""Slices that change hands under a driver: a lease lost while it slept, an eviction without a commit, a run's end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.runs.conftest import Track, until
from tpu.runs import membership
from tpu.runs.config import RunConfig
from tpu.runs.driver import AttemptEnded, RunDriver
from tpu.runs.event_log import load_events
from tpu.slices.lease import Lease, LeaseObserver, LeaseState
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import PoolSettings

HELD = ("slice-intended", "slice-leased", "slice-released", "slice-deleted")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEASE_BEAT_S", 0.5)
    monkeypatch.setattr(membership, "LeaseObserver", functools.partial(LeaseObserver, ttl_s=2.0))


@pytest.fixture
def book(track: Track) -> Iterator[GcsLeaseBook]:
    """The book of the track's pool; in the end the cloud has nothing any more."""
    yield GcsLeaseBook(track.bucket)
    track.assert_nothing_left()


async def settle(book: GcsLeaseBook, **values) -> None:
    await book.set_settings("default", lambda _: PoolSettings(**values))


async def leases(book: GcsLeaseBook) -> list[Lease]:
    kept = await book.list("default", past=True)
    return sorted((one.lease for one in kept), key=lambda lease: lease.created)


def history(track: Track, run: RunConfig, *kinds: str) -> list[str]:
    return [event.kind for event in load_events(track.directory(run.name)) if event.kind in kinds]


def ends(track: Track, run: RunConfig) -> list[tuple[str, str]]:
    events = load_events(track.directory(run.name))
    told = [event.detail for event in events if event.kind == "attempt-ended"]
    return [(detail["verdict"], detail["reason"]) for detail in told]


@contextlib.asynccontextmanager
async def started(track: Track, run: RunConfig) -> AsyncIterator[RunDriver]:
    """A run whose gang trains; cleaned up at the end."""
    async with track.driving(run) as driver:
        try:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
            await until(lambda: driver.view and driver.view.step >= 1, f"{run.name} trains")
            yield driver
        finally:
            await driver.clean_up("the test is done with it")


def fall_asleep(driver: RunDriver) -> None:
    """The driver renews nothing any more, as a process that is stopped or cut off."""
    task = driver._run.member._task
    assert task is not None
    task.cancel()


async def test_a_driver_that_slept_through_its_lease_leaves_the_slice_to_its_new_holder(
    track: Track, book: GcsLeaseBook
):
    await settle(book, max_slices=1)
    sleepy = track.numpy_run("sleepy", steps=2000, every=1000, step_s=0.02, budget={"infrastructure": 0})
    heir = track.numpy_run("heir", steps=200, every=100, step_s=0.02)
    async with started(track, sleepy) as driver:
        fall_asleep(driver)
        async with started(track, heir) as other:
            with pytest.raises(AttemptEnded, match="heir holds chips 0,1,2,3") as caught:
                await driver.wait_for_commit(1000)
            assert caught.value.retry
            # It comes back by an older lease: nothing of it starts beside the heir.
            await track.segment(other, 200)
            assert [holder.run for lease in await leases(book) for holder in lease.holders] == ["heir"]
    assert history(track, sleepy, *HELD) == ["slice-intended", "slice-released"]
    assert [verdict for verdict, _ in ends(track, heir)] == ["finished"]
    assert [verdict for verdict, _ in ends(track, sleepy)] == ["preempted"]
    (lease,) = await leases(book)
    assert lease.state is LeaseState.GONE


async def test_hosts_refuse_a_gang_that_comes_by_an_older_lease(track: Track, book: GcsLeaseBook):
    await settle(book, max_slices=1)
    late = track.numpy_run("late", steps=20)
    heir = track.numpy_run("heir", steps=200, every=100, step_s=0.02)
    async with track.driving(late) as driver:
        try:
            await driver.provision()
            await driver.sync()
            tenant = await driver._slices.hold_on()
            fall_asleep(driver)
            async with started(track, heir):
                # As if the lease had been lost in the moment after it was looked at.
                driver._slices.hold_on = lambda: asyncio.sleep(0, tenant)  # type: ignore[method-assign]
                await driver.start_attempt()
                assert driver._attempt_task is not None
                verdict = await driver._attempt_task
                assert verdict.kind.value == "preempted"
                assert "heir holds chips" in verdict.reason
                assert "others have chip 0 by a lease of term 2" in str(verdict.evidence)
                assert len(track.emulator.nodes()) == 1
        finally:
            await driver.clean_up("the test is done with it")
    assert history(track, late, *HELD) == ["slice-intended", "slice-released"]


async def test_a_program_that_commits_nothing_is_evicted_when_its_time_is_over(
    track: Track, book: GcsLeaseBook
):
    await settle(book, max_slices=1, evict_minutes=0.02)
    low = track.numpy_run(
        "low", contract=False, command="sleep 1000", checkpoints={}, grace_seconds=1, budget={"preemption": 0}
    )
    high = track.numpy_run("high", steps=20, priority=1)
    async with track.driving(low) as driver:
        try:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
            training = asyncio.create_task(track.train(high))
            with pytest.raises(AttemptEnded, match=r"evicted by run high \(priority 1\)") as caught:
                await driver.wait_for_commit(low.steps)
            assert caught.value.retry  # charged to no budget
            await training
        finally:
            await driver.clean_up("the test is done with it")
    assert history(track, low, *HELD) == ["slice-intended", "slice-released"]
    assert history(track, high, *HELD) == ["slice-leased", "slice-deleted"]


async def test_without_idle_minutes_a_run_deletes_its_slice_as_ever(track: Track, book: GcsLeaseBook):
    run = track.numpy_run("alone")
    await track.train(run)
    assert history(track, run, *HELD) == ["slice-intended", "slice-deleted"]
    assert [lease.state for lease in await leases(book)] == [LeaseState.GONE]


async def test_a_slice_that_is_preempted_is_lost_for_all_runs_on_its_chips_and_deleted_once(
    track: Track, book: GcsLeaseBook
):
    # More than a second from commit to commit: closer ones are joined, and the last is then there before the gang ends.
    runs = [
        track.numpy_run(f"part-{n}", steps=160, every=80, step_s=0.02, slice={"chips": 2}) for n in range(2)
    ]

    async def train(run: RunConfig) -> None:
        async with track.driving(run) as driver:
            try:
                for stop in driver.record.segments:
                    while not await driver.committed(stop):
                        with contextlib.suppress(AttemptEnded):
                            async with driver.preparing():
                                await track.segment(driver, stop)
            finally:
                await driver.clean_up("the test is done with it")

    async def preempt() -> None:
        await until(
            lambda: all(len(track.fence(run.name).commits) >= 1 for run in runs), "both have committed"
        )
        (node,) = track.emulator.nodes()
        await asyncio.to_thread(track.emulator.preempt, node["node"])

    await asyncio.gather(*map(train, runs), preempt())
    first, second = (lease for lease in await leases(book) if lease.ready is not None)
    assert {span.run for lease in (first, second) for span in lease.spans if span.run} == {"part-0", "part-1"}
    assert first.state is second.state is LeaseState.GONE
    for run in runs:
        assert [verdict for verdict, _ in ends(track, run)] == ["preempted", "finished"]
    assert track.digest("part-0") == track.digest("part-1")
