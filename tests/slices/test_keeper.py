"""A pool is kept at its size, whatever the cloud does, and whenever its keeper dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.slices.test_provision import CLOCK, until
from tpu.checkpoint import objects
from tpu.cloud import QueuedResourceRequest
from tpu.cloud.google import GoogleTpuCloud
from tpu.cloud.values import PREEMPTIBLE_LIFE_S
from tpu.emulator.emulator import Emulator
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.intent import node_request
from tpu.slices.keeper import Keeper
from tpu.slices.labels import ownership_labels
from tpu.slices.lease import Holder, Lease, LeaseState
from tpu.slices.lease_book import GcsLeaseBook, update
from tpu.slices.life import LifeState
from tpu.slices.monitor import Monitor
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_size import Option
from tpu.slices.project_memory import memory_of_bucket
from tpu.slices.request import SliceRequest

ZONE, OTHER = "us-central2-b", "us-east5-b"
SPOT = Candidate(ZONE, "v4-8", "spot", 1.0)
POOL = "kept"


class Book(GcsLeaseBook):
    """Counts the passes of keepers: each looks at the settings once."""

    passes = 0

    async def settings(self, pool: str) -> PoolSettings:
        self.passes += 1
        return await super().settings(pool)


class Pool:
    """A pool in the emulated cloud and bucket, with keepers that come and go."""

    def __init__(self, cloud: GoogleTpuCloud, bucket: str) -> None:
        self.cloud = cloud
        self.bucket = bucket
        self.book = Book(bucket)
        self.memory = memory_of_bucket(bucket, CLOCK)
        self.said: list[str] = []
        self.uids = (f"keeper-{number}" for number in itertools.count())

    @contextlib.asynccontextmanager
    async def kept(self, *options: Option, **changes: Any) -> AsyncIterator[Keeper]:
        """A keeper at work; it is cut off at the end of the block, wherever it stands."""
        monitor = Monitor(self.cloud, CLOCK, every_s=0.2)
        keeper = Keeper(
            pool=POOL, options=options or [Option(SPOT)], cloud=self.cloud, book=self.book, memory=self.memory,
            request=SliceRequest(ZONE, "v4-8", labels=ownership_labels(POOL, "keeper")),
            monitor=monitor, clock=CLOCK, uid=next(self.uids), report=self.said.append, every_s=0.2, **changes,
        )  # fmt: skip
        self.work = task = asyncio.create_task(keeper.run())
        try:
            yield keeper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await monitor.close()

    async def leases(self, state: LeaseState | None = None) -> list[Lease]:
        kept = [one.lease for one in await self.book.list(POOL, past=True)]
        return [lease for lease in kept if state is None or lease.state is state]

    async def until(self, state: LeaseState, count: int) -> list[Lease]:
        """Wait until so many leases have this state."""
        try:
            async with asyncio.timeout(40):
                while len(found := await self.leases(state)) != count:
                    await asyncio.sleep(0.05)
                    if self.work.done():
                        self.work.result()
                return found
        except TimeoutError:
            raise AssertionError(f"no {count} {state} in {await self.leases()}; said {self.said}") from None

    async def pass_by(self, passes: int = 3) -> None:
        """Let the keeper look so many times more: what it was to do it would have begun by then."""
        goal = self.book.passes + passes
        async with asyncio.timeout(40):
            while self.book.passes < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def change(self, slice: str, change: Callable[[Lease], Lease]) -> None:
        await update(self.book, POOL, slice, change)


@pytest.fixture
def pool(cloud: GoogleTpuCloud, emulator: Emulator) -> Pool:
    return Pool(cloud, emulator.env["TPU_RELAY_BUCKET"])


def nodes(emulator: Emulator) -> set[str]:
    return {node["node"] for node in emulator.nodes()}


async def test_a_pool_is_kept_at_its_size_and_emptied(pool: Pool, emulator: Emulator) -> None:
    async with pool.kept() as keeper:
        keeper.want(2)
        ready = await pool.until(LeaseState.READY, 2)
        assert nodes(emulator) == {lease.slice for lease in ready}
        emulator.preempt(ready[0].slice)  # P1
        (gone,) = await pool.until(LeaseState.GONE, 1)
        assert gone.slice == ready[0].slice
        assert "PREEMPTED" in gone.why or "SUSPEND" in gone.why
        await pool.until(LeaseState.READY, 2)
        keeper.want(0)
        await pool.until(LeaseState.GONE, 3)
        assert emulator.queued_resources() == []
        assert nodes(emulator) == set()
        assert keeper.counts()[LifeState.READY] == 0


async def test_what_a_run_holds_is_kept_and_what_is_quarantined_replaced(
    pool: Pool, emulator: Emulator
) -> None:
    async with pool.kept() as keeper:
        keeper.want(1)
        (held,) = await pool.until(LeaseState.READY, 1)
        await pool.change(held.slice, lambda lease: leases.take(lease, Holder("r", "r", (0,)), 1.0))
        keeper.want(0)
        await pool.pass_by()
        (still,) = await pool.leases()
        assert (still.state, [h.run for h in still.holders]) == (LeaseState.READY, ["r"])
        # The run finds that programs fail there: nobody gets it any more, and another takes its place at once.
        keeper.want(1)
        await pool.change(held.slice, lambda lease: leases.quarantine(lease, "chips stay busy"))
        (other,) = await pool.until(LeaseState.READY, 1)
        assert nodes(emulator) == {held.slice, other.slice}
        await pool.change(held.slice, lambda lease: leases.release(lease, "r", 3.0))
        (gone,) = await pool.until(LeaseState.GONE, 1)
        assert gone.why == "chips stay busy"
        assert nodes(emulator) == {other.slice}
        keeper.want(0)
        await pool.until(LeaseState.GONE, 2)


@pytest.mark.parametrize("moment_s", [0.05, 0.3, 0.6, 1.0])
async def test_V6_a_keeper_that_is_killed_at_any_moment_leaves_a_pool_that_the_next_one_keeps(
    pool: Pool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, moment_s: float
) -> None:
    monkeypatch.setattr("tpu.slices.keeper.CREATION_S", 0.5)
    emulator.set_delay(0.3)
    emulator.set_delete_delay(0.3)
    async with pool.kept() as keeper:
        keeper.want(2)
        await asyncio.sleep(moment_s)  # the moment is what the test is about
    async with pool.kept() as keeper:
        keeper.want(2)
        ready = await pool.until(LeaseState.READY, 2)
        keeper.want(0)
        await asyncio.sleep(moment_s)
    async with pool.kept():
        await pool.until(LeaseState.GONE, len(await pool.leases()))
        assert {lease.slice for lease in ready} <= {lease.slice for lease in await pool.leases()}
        assert emulator.queued_resources() == []
        assert nodes(emulator) == set()


async def test_V6_a_creation_whose_answer_was_lost_is_found_and_deleted(
    pool: Pool, emulator: Emulator
) -> None:
    # The call is tried again, so the answer must be lost each time.
    emulator.fail_next("CreateQueuedResource", "INTERNAL", "lost", times=1, after=True)
    async with pool.kept() as keeper:
        keeper.want(1)
        (gone,) = await pool.until(LeaseState.GONE, 1)
        (ready,) = await pool.until(LeaseState.READY, 1)
        assert gone.slice != ready.slice
        assert nodes(emulator) == {ready.slice}
        keeper.want(0)
        await pool.until(LeaseState.GONE, 2)


async def test_V6_a_creation_that_arrives_after_its_slice_was_given_up_is_deleted(
    pool: Pool, emulator: Emulator
) -> None:
    async with pool.kept() as keeper:
        keeper.want(1)
        (first,) = await pool.until(LeaseState.READY, 1)
        keeper.want(0)
        await pool.until(LeaseState.GONE, 1)
        request = SliceRequest(ZONE, "v4-8", labels=ownership_labels(POOL, "keeper"))
        await pool.cloud.create_queued_resource(
            ZONE, first.slice, QueuedResourceRequest(node_request(first.slice, request))
        )
        async with asyncio.timeout(20):
            while emulator.queued_resources():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_V8_a_deletion_is_over_when_the_cloud_says_so(pool: Pool, emulator: Emulator) -> None:
    emulator.set_delete_delay(1.0)
    async with pool.kept() as keeper:
        keeper.want(1)
        (ready,) = await pool.until(LeaseState.READY, 1)
        emulator.fail_next("DeleteQueuedResource", "PERMISSION_DENIED", "not now")
        keeper.want(0)
        seen = []
        while not seen or seen[-1] is not LeaseState.GONE:
            there = nodes(emulator)
            seen.append((await pool.leases())[0].state)
            assert seen[-1] is not LeaseState.GONE or not there
            await asyncio.sleep(0.02)
        assert LeaseState.QUARANTINED in seen  # nobody could take it meanwhile
        assert emulator.queued_resources() == []
        assert nodes(emulator) == set(), ready
        assert any("not now" in line for line in pool.said)


async def test_V1_V2_candidates_are_tried_in_order_and_dropped_for_good(
    pool: Pool, emulator: Emulator
) -> None:
    other = Candidate(OTHER, "v5p-8", "spot")
    third = Candidate("europe-west4-a", "v5litepod-4", "spot")
    emulator.stockout(ZONE, "v4-8")
    emulator.set_quota(OTHER, "v5p-8", 0)
    options = [Option(SPOT), Option(other), Option(third, at_most=1)]
    async with pool.kept(*options) as keeper:
        keeper.want(2)
        (ready,) = await pool.until(LeaseState.READY, 1)
        assert ready.candidate == third
        emulator.stockout(ZONE, "v4-8", on=False)
        assert "TPUV5P" in keeper.reasons[other]
        assert {lease.candidate for lease in await pool.until(LeaseState.READY, 2)} == {third, SPOT}
        keeper.want(0)
        await pool.until(LeaseState.GONE, len(await pool.leases()))


async def test_a_pool_is_never_larger_than_max_slices(pool: Pool, emulator: Emulator) -> None:
    await pool.book.set_settings(POOL, lambda settings: PoolSettings(max_slices=2))
    async with pool.kept() as keeper:
        keeper.want(5)
        await pool.until(LeaseState.READY, 2)
        await pool.pass_by()
        assert len(await pool.leases()) == len(nodes(emulator)) == 2
        keeper.want(0)
        await pool.until(LeaseState.GONE, 2)


async def test_P10_a_slice_in_repair_stays_leased_until_it_is_ready_again(
    pool: Pool, emulator: Emulator
) -> None:
    reserved = Candidate(ZONE, "v4-8", "on-demand")
    async with pool.kept(Option(reserved)) as keeper:
        keeper.want(1)
        (ready,) = await pool.until(LeaseState.READY, 1)
        await pool.change(ready.slice, lambda lease: leases.take(lease, Holder("r", "r", (0,)), 1.0))
        emulator.set_node_state(ready.slice, "REPAIRING")
        async with asyncio.timeout(20):
            while not keeper.counts()[LifeState.RECOVERING]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await pool.pass_by()
        emulator.set_node_state(ready.slice, "READY")
        async with asyncio.timeout(20):
            while not keeper.counts()[LifeState.READY]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (same,) = await pool.leases()
        assert [h.run for h in same.holders] == ["r"]
        await pool.change(ready.slice, lambda lease: leases.release(lease, "r", 2.0))
        keeper.want(0)
        await pool.until(LeaseState.GONE, 1)


async def test_P10_a_repair_that_takes_too_long_is_waited_for_no_more(pool: Pool, emulator: Emulator) -> None:
    async with pool.kept(Option(Candidate(ZONE, "v4-8", "on-demand")), repair_s=0.5) as keeper:
        keeper.want(1)
        (ready,) = await pool.until(LeaseState.READY, 1)
        emulator.set_node_state(ready.slice, "REPAIRING")
        (gone,) = await pool.until(LeaseState.GONE, 1)
        assert "0.5 s" in gone.why
        (other,) = await pool.until(LeaseState.READY, 1)
        assert nodes(emulator) == {other.slice}
        keeper.want(0)
        await pool.until(LeaseState.GONE, 2)


async def test_P11_a_slice_whose_day_is_nearly_over_is_given_to_nobody(
    pool: Pool, emulator: Emulator
) -> None:
    candidate = Option(Candidate(ZONE, "v4-8", "preemptible"))
    async with pool.kept(candidate) as keeper:
        keeper.want(1)
        (ready,) = await pool.until(LeaseState.READY, 1)
    day_ago = CLOCK.time() - PREEMPTIBLE_LIFE_S + 60
    await pool.change(ready.slice, lambda lease: dataclasses.replace(lease, ready=day_ago))
    async with pool.kept(candidate) as keeper:
        keeper.want(1)
        (gone,) = await pool.until(LeaseState.GONE, 1)
        assert gone.slice == ready.slice
        assert "its time is over" in gone.why
        (other,) = await pool.until(LeaseState.READY, 1)
        assert nodes(emulator) == {other.slice}
        keeper.want(0)
        await pool.until(LeaseState.GONE, 2)


async def test_a_pool_is_kept_also_without_what_the_project_remembers(pool: Pool) -> None:
    for name in ("zone-health", "creation-rate"):
        objects.create_exclusive(f"{pool.bucket}/pools/{name}.json", b"{")
    async with pool.kept() as keeper:
        keeper.want(1)
        (lease,) = await pool.until(LeaseState.READY, 1)
        assert any("going on without" in line and "zone-health.json" in line for line in pool.said)
        assert any("going on without" in line and "creation-rate.json" in line for line in pool.said)
        # Somebody writes rubbish into a lease, and puts it in order again.
        url = f"{pool.bucket}/pools/{POOL}/slices/{lease.slice}.json"
        found = objects.read(url)
        assert found is not None
        generation = objects.compare_and_set(url, b"{", found[1])
        broken = f"{lease.slice}.json: a lease cannot be understood"
        await until(lambda: any(broken in line for line in pool.said), "a word about it")
        objects.compare_and_set(url, found[0], generation)
        keeper.want(0)
        await pool.until(LeaseState.GONE, 1)
