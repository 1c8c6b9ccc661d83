"""One beat for all runs of a process: few writes, and what one run hears does not touch another."""

from __future__ import annotations

from tests.runs.conftest import until
from tests.runs.test_membership import POOL, Room, take
from tests.slices.test_pool import V4, wants
from tpu.checkpoint.retry import StorageUnavailable
from tpu.runs.lease_beat import LeaseBeat, renew_together
from tpu.runs.membership import Membership
from tpu.slices import lease as leases
from tpu.slices.lease import LEASE_TTL_S, Lease
from tpu.slices.lease_book import Kept, MemoryLeaseBook, update


class CountingBook(MemoryLeaseBook):
    """Counts what a bucket would be asked; it does not answer while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = 0
        self.away: set[str] = set()

    async def read(self, pool: str, slice: str) -> Kept | None:
        self.reads += 1
        if slice in self.away:
            raise StorageUnavailable("away")
        return await super().read(pool, slice)

    async def change(self, lease: Lease, generation: int) -> Kept:
        self.writes += 1
        return await super().change(lease, generation)


class Process(Room):
    """Runs of one process, of one chip each."""

    def __init__(self) -> None:
        super().__init__()
        self.book = self.counted = CountingBook()
        self.beat = LeaseBeat(self.book, self.clock)

    def run(self, name: str, chips: int | None = 1, **values) -> Membership:
        return Membership(
            self.book, POOL, wants(name, chips, **values), self.clock, self.said.append, self.beat
        )

    async def on_one_slice(self, *names: str) -> list[Membership]:
        first, *others = [self.run(name) for name in names]
        await self.with_slice("s", first)
        for other in others:
            await take(other)
        return [first, *others]

    async def beats(self) -> dict[str, int]:
        return {holder.run: holder.beat for holder in (await self.lease("s")).holders}


async def test_runs_on_one_slice_are_renewed_by_one_reading_and_one_writing():
    process = Process()
    members = await process.on_one_slice("a", "b", "c", "d")
    before = await process.beats()
    process.counted.reads = process.counted.writes = 0
    await renew_together(process.book, "s", members, process.clock)
    assert (process.counted.reads, process.counted.writes) == (1, 1)
    assert await process.beats() == {name: beats + 1 for name, beats in before.items()}


async def test_one_that_has_lost_its_lease_hears_it_and_the_others_are_renewed():
    process = Process()
    lost, kept = await process.on_one_slice("a", "b")
    await update(process.book, POOL, "s", lambda lease: leases.release(lease, lost.place[1], 0.0))
    before = await process.beats()
    await renew_together(process.book, "s", [lost, kept], process.clock)
    assert (list(lost.lost), list(lost.held), list(kept.held)) == (["s"], [], ["s"])
    assert await process.beats() == {"b": before["b"] + 1}


async def test_a_run_of_another_process_that_has_died_is_dropped_once():
    process = Process()
    members = await process.on_one_slice("a", "b")
    stranger = Membership(process.book, POOL, wants("dead", 1), process.clock, process.said.append)
    await take(stranger)
    for _ in range(int(LEASE_TTL_S / 15) + 1):
        await renew_together(process.book, "s", members, process.clock)
        process.clock.now += 15
    assert list(await process.beats()) == ["a", "b"]


async def test_the_beat_goes_on_whoever_leaves_and_whichever_slice_cannot_be_renewed():
    process = Process()
    one, other = await process.on_one_slice("a", "b")
    third = process.run("c", None)
    await third.intend("t", V4)
    await third.ready("t")
    process.counted.away = {"t"}
    for member in (one, other, third):
        member.start()
    await until(lambda: any("the lease of t is not renewed" in line for line in process.said), "a beat")
    await one.leave()
    left = await process.beats()
    for _ in range(3):
        writes = process.counted.writes
        await until(lambda writes=writes: process.counted.writes > writes + 1, "two more beats")
    after = await process.beats()
    assert after["b"] > left["b"]
    assert after["a"] <= left["a"] + 1  # one may have been under way
    await other.leave()
    await third.leave()
