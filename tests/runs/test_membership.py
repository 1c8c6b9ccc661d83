"""A run's place in its pool: runs that decide at the same time, leases that are lost, claims that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.runs.conftest import until
from tests.slices.test_pool import V4, wants
from tpu.runs.eviction import Eviction
from tpu.runs.membership import Membership, Withdrawn
from tpu.slices import lease as leases
from tpu.slices.lease import LEASE_TTL_S, Claim, Lease, LeaseState, MalformedLease
from tpu.slices.lease_book import Kept, MemoryLeaseBook, update
from tpu.slices.pool import Create, Decision, Evict, Take, Wait
from tpu.slices.pool_settings import PoolSettings

POOL = "p"


class HandClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Room:
    """One pool, and runs that look at it."""

    def __init__(self) -> None:
        self.book, self.clock = MemoryLeaseBook(), HandClock()
        self.said: list[str] = []

    def run(self, name: str, chips: int | None = None, **values) -> Membership:
        return Membership(self.book, POOL, wants(name, chips, **values), self.clock, self.said.append)

    async def settle(self, **settings) -> None:
        await self.book.set_settings(POOL, lambda _: PoolSettings(**settings))

    async def lease(self, name: str) -> Lease:
        kept = await self.book.read(POOL, name)
        assert kept is not None
        return kept.lease

    async def with_slice(self, name: str, owner: Membership) -> None:
        await owner.intend(name, V4)
        await owner.ready(name)


@pytest.fixture
def room() -> Room:
    return Room()


async def decide(member: Membership) -> Decision:
    return await member.decide((V4,))


async def take(member: Membership) -> Lease:
    decision = await decide(member)
    assert isinstance(decision, Take)
    return await member.take(decision.parts[0])


async def test_of_two_that_intend_at_once_the_later_withdraws_from_a_full_pool(room: Room):
    await room.settle(max_slices=1)
    first, second = room.run("a"), room.run("b")
    assert isinstance(await decide(first), Create)
    assert isinstance(await decide(second), Create)
    await first.intend("sa", V4)
    with pytest.raises(Withdrawn, match="max_slices"):
        await second.intend("sb", V4)
    assert (await room.lease("sb")).state is LeaseState.GONE
    assert second.held == {}
    assert isinstance(await decide(second), Wait)


async def test_of_two_one_chip_runs_that_intend_at_once_the_later_goes_into_the_slice_of_the_first(
    room: Room,
):
    first, second = room.run("a", 1), room.run("b", 1)
    for member in (first, second):
        assert isinstance(await decide(member), Create)
    await first.intend("sa", V4)
    with pytest.raises(Withdrawn, match="sa has room"):
        await second.intend("sb", V4)
    assert (await take(second)).slice == "sa"
    assert (first.held["sa"].chips, second.held["sa"].chips) == ((0,), (1,))
    assert second.held["sa"].tenant.term > first.held["sa"].tenant.term


async def test_a_silent_holder_is_dropped_only_by_who_has_watched_it(room: Room):
    await room.settle(max_slices=1)
    dead, heir = room.run("dead"), room.run("heir")
    await room.with_slice("s", dead)
    for _ in range(int(LEASE_TTL_S / 15)):
        assert isinstance(await decide(heir), Wait)
        room.clock.now += 15
    late = room.run("late")
    assert isinstance(await decide(late), Wait)
    lease = await take(heir)
    assert [holder.run for holder in lease.holders] == ["heir"]
    await dead.renew("s")
    assert "heir holds chips" in dead.lost["s"]
    assert dead.held == {}
    # It leaves alone what is another's now.
    assert await dead.part_with("s", clean=False, why="its end")
    assert await room.lease("s") == lease


async def test_a_driver_that_comes_back_finds_its_lease_or_learns_that_it_is_lost(room: Room):
    await room.with_slice("s", room.run("a"))
    again = room.run("a")
    assert await again.take_up("s", V4)
    assert again.held["s"].chips == (0, 1, 2, 3)
    await update(room.book, POOL, "s", lambda lease: leases.drop(lease, lease.holders[0], 0.0))
    third = room.run("a")
    assert not await third.take_up("s", V4)
    assert "expired" in third.lost["s"]


async def test_a_slice_that_was_asked_for_without_a_lease_gets_one(room: Room):
    member = room.run("a")
    assert await member.take_up("old", V4)
    assert (await room.lease("old")).holder("uid-a")


async def test_what_a_dead_driver_held_without_having_noted_it_is_given_back(room: Room):
    await room.settle(max_slices=1)
    await room.with_slice("s", room.run("other"))
    await update(room.book, POOL, "s", lambda lease: leases.release(lease, "uid-other", 0.0))
    await take(room.run("a"))
    assert (await take(room.run("a"))).slice == "s"


@pytest.mark.parametrize(
    ("settings", "clean", "others", "given_back"),
    [
        ({}, True, False, False),
        ({"idle_minutes": 1}, True, False, True),
        ({"min_slices": 1, "candidates": (V4,)}, True, False, True),
        ({"idle_minutes": 1}, False, False, False),
        ({}, True, True, True),
        ({}, False, True, True),
    ],
)
async def test_who_leaves_gives_back_or_deletes(room: Room, settings, clean, others, given_back):
    await room.settle(**settings)
    member, other = room.run("a", 1), room.run("b", 1)
    await room.with_slice("s", member)
    if others:
        await take(other)
    assert await member.part_with("s", clean=clean, why="its end") is given_back
    lease = await room.lease("s")
    assert lease.open is (clean and given_back)
    if others and not clean:  # the last to leave deletes what is unfit
        assert not await other.part_with("s", clean=True, why="its end")
    if not given_back:
        await member.gone("s", "deleted")
        assert (await room.lease("s")).state is LeaseState.GONE


async def test_a_run_that_waits_is_next_in_line_and_the_slice_is_not_deleted_under_it(room: Room):
    await room.settle(max_slices=1)
    member, waiting = room.run("a"), room.run("b")
    await room.with_slice("s", member)
    decision = await decide(waiting)
    assert isinstance(decision, Wait)
    assert (await room.lease("s")).claim == Claim("b", "uid-b", 0, (0, 1, 2, 3), since=1000.0)
    assert await member.part_with("s", clean=True, why="its end")
    assert (await take(waiting)).claim is None


async def test_an_evicted_run_hears_of_it_with_its_next_beat_and_who_gave_up_is_forgotten(room: Room):
    await room.settle(max_slices=1, evict_minutes=3)
    low, high = room.run("low"), room.run("high", priority=5)
    await room.with_slice("s", low)
    decision = await decide(high)
    assert isinstance(decision, Evict)
    told = "evicted for being of lower priority: low leaves at its next commit, or in 3 minutes at the latest"
    assert decision.reason == told
    assert (await decide(high)).reason == told  # as long as it goes on: it is said once
    await low.renew("s")
    assert low.evicted["s"].run == "high"
    assert low.settings.evict_minutes == 3
    told = "high (priority 5) wants s: leaving at the next commit, or in 3 minutes at the latest"
    assert room.said == [told]
    await high.leave()
    await low.renew("s")
    assert low.evicted == {}


async def test_nobody_leaves_for_a_run_that_died_while_it_waited(room: Room):
    await room.settle(max_slices=1)
    low, high = room.run("low"), room.run("high", priority=5)
    await room.with_slice("s", low)
    await decide(high)
    for _ in range(int(LEASE_TTL_S / 15) + 1):
        await low.renew("s")
        room.clock.now += 15
    await low.renew("s")
    assert low.evicted == {}
    assert (await room.lease("s")).claim is None


async def test_claims_are_renewed_while_it_waits_and_given_back_when_it_has_something_else(room: Room):
    await room.settle(max_slices=2)
    low, other, high = room.run("low"), room.run("other"), room.run("high", priority=5)
    await room.with_slice("s", low)
    await room.with_slice("t", other)
    assert isinstance(await decide(high), Evict)
    (claimed,) = [name for name in "st" if (await room.lease(name)).claim]
    room.clock.now += 30
    await decide(high)
    claim = (await room.lease(claimed)).claim
    assert claim is not None
    assert claim.beat == 1
    free = {"s": other, "t": low}[claimed]
    room.clock.now += 1
    name = next(iter(free.held))
    await room.settle(max_slices=2, idle_minutes=5)
    assert await free.part_with(name, clean=True, why="its end")
    assert (await take(high)).slice == name
    await decide(room.run("nobody", priority=-1))
    await high.leave()
    assert (await room.lease(claimed)).claim is None


class FaultyBook(MemoryLeaseBook):
    """A book in which one lease cannot be read for a while; `on_read` hears of each read."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: str | None = None
        self.on_read: Callable[[str], object] = lambda slice: None

    async def read(self, pool: str, slice: str) -> Kept | None:
        self.on_read(slice)
        await asyncio.sleep(0)
        if slice == self.damaged:
            raise MalformedLease(f"{slice}.json cannot be understood")
        return await super().read(pool, slice)

    def beat(self, name: str) -> int:
        (holder,) = self._kept[POOL][name].lease.holders
        return holder.beat


async def test_a_run_beats_on_whatever_becomes_of_one_of_its_leases(room: Room):
    room.book = book = FaultyBook()
    member = room.run("a")
    await room.with_slice("s", member)
    await room.with_slice("t", member)
    book.damaged = "s"
    member.start()
    await until(lambda: any("s.json cannot be understood" in line for line in room.said), "a word about it")
    book.damaged = None
    await until(lambda: book.beat("s") >= 2 and book.beat("t") >= 2, "beats of both leases")
    # One is given back while the other one is renewed.
    book.on_read = lambda slice: member.held.pop("t", None) if slice == "s" else None
    before = book.beat("s")
    await until(lambda: book.beat("s") >= before + 3, "beats of the lease that is left")
    assert not any("the lease of t" in line for line in room.said)
    await member.leave()


async def test_a_slice_that_is_being_made_is_left_for_a_free_one_or_an_eviction_only(room: Room):
    await room.settle(max_slices=2)
    low, high = room.run("low"), room.run("high", priority=5)
    await room.with_slice("s", low)
    await high.intend("coming", V4)
    assert not await high.better_than_making((V4,))
    assert await high.better_than_making(())  # no zone serves, and somebody can be evicted
    await room.settle(max_slices=2, idle_minutes=5)
    assert await low.part_with("s", clean=True, why="its end")
    assert await high.better_than_making((V4,))


def test_who_is_evicted_leaves_at_its_next_commit_or_when_that_takes_too_long():
    claim = Claim("big", "uid-big", 5, (0,), due=True)
    eviction, patience_s = Eviction(), 60.0
    assert eviction.why_leave(None, 10, 0.0, patience_s) is None
    assert eviction.why_leave(claim, 10, 100.0, patience_s) is None
    assert eviction.why_leave(claim, 10, 159.0, patience_s) is None
    assert eviction.why_leave(claim, 20, 159.0, patience_s) == "evicted by run big (priority 5)"
    assert eviction.why_leave(claim, 10, 160.0, patience_s) == "evicted by run big (priority 5)"
    # Another claim, later: it gets its own time.
    assert eviction.why_leave(None, 20, 170.0, patience_s) is None
    assert eviction.why_leave(replace(claim, run="other"), 20, 200.0, patience_s) is None
