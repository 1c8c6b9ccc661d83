"""Leases in the bucket: one of two wins, gone ones are not read again, and memory behaves the same."""

from __future__ import annotations

import asyncio

import pytest

from tpu.checkpoint.files import write
from tpu.checkpoint.objects import StaleGeneration
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.slices.candidate import Candidate
from tpu.slices.lease import Holder, Lease, LeaseRefused, MalformedLease, gone, intend, ready, take
from tpu.slices.lease_book import GcsLeaseBook, LeaseBook, LeaseExists, MemoryLeaseBook, update
from tpu.slices.pool_settings import PoolSettings, PoolSettingsError

V4 = Candidate("us-central2-b", "v4-8", "spot")


@pytest.fixture(params=["bucket", "memory"])
def book(request: pytest.FixtureRequest) -> LeaseBook:
    if request.param == "memory":
        return MemoryLeaseBook()
    emulator: Emulator = request.getfixturevalue("emulator")
    return GcsLeaseBook(Connection.from_environment(emulator.env).bucket)


def lease(name: str, pool: str = "p") -> Lease:
    return ready(intend(name, pool, V4, 4, "uid", 1.0), 2.0)


async def test_a_name_is_given_once_also_after_its_slice_is_gone(book: LeaseBook):
    kept = await book.create(lease("a"))
    with pytest.raises(LeaseExists):
        await book.create(lease("a"))
    await book.change(gone(kept.lease, "deleted", 3.0), kept.generation)
    with pytest.raises(LeaseExists):
        await book.create(lease("a"))


async def test_of_many_that_take_the_same_chip_one_wins(book: LeaseBook):
    await book.create(lease("a"))

    async def try_to_take(number: int) -> bool:
        wanted = Holder(f"r{number}", f"u{number}", (number % 2,))
        try:
            await update(book, "p", "a", lambda lease: take(lease, wanted, 3.0))
        except LeaseRefused:
            return False
        return True

    won = await asyncio.gather(*(try_to_take(number) for number in range(8)))
    assert sum(won[0::2]) == sum(won[1::2]) == 1
    kept = await book.read("p", "a")
    assert kept is not None
    assert sorted(chip for holder in kept.lease.holders for chip in holder.chips) == [0, 1]


async def test_an_old_generation_changes_nothing(book: LeaseBook):
    kept = await book.create(lease("a"))
    after = await book.change(gone(kept.lease, "deleted", 3.0), kept.generation)
    with pytest.raises(StaleGeneration):
        await book.change(take(kept.lease, Holder("r", "u", (0,)), 3.0), kept.generation)
    assert await book.read("p", "a") == after


async def test_the_list_has_what_exists_and_on_request_what_was(book: LeaseBook):
    first, second = await book.create(lease("a")), await book.create(lease("b"))
    await book.create(lease("c", pool="other"))
    assert [kept.lease.slice for kept in await book.list("p")] == ["a", "b"]
    await book.change(gone(first.lease, "deleted", 3.0), first.generation)
    changed = await book.change(take(second.lease, Holder("r", "u", (0,)), 3.0), second.generation)
    assert await book.list("p") == [changed]
    assert [kept.lease.slice for kept in await book.list("p", past=True)] == ["a", "b"]
    assert await book.list("empty") == []


async def test_only_what_changed_is_read_again(emulator: Emulator, monkeypatch: pytest.MonkeyPatch):
    book = GcsLeaseBook(Connection.from_environment(emulator.env).bucket)
    kept = [await book.create(lease(name)) for name in "abc"]
    await book.change(gone(kept[0].lease, "deleted", 3.0), kept[0].generation)
    await book.list("p")
    await book.change(take(kept[1].lease, Holder("r", "u", (0,)), 3.0), kept[1].generation)
    read: list[str] = []
    original = GcsLeaseBook._read
    monkeypatch.setattr(GcsLeaseBook, "_read", staticmethod(lambda url: read.append(url) or original(url)))
    assert len(await book.list("p")) == 2
    assert [url.rpartition("/")[2] for url in read] == ["b.json"]


async def test_a_damaged_lease_is_told_once_and_costs_the_others_nothing(emulator: Emulator):
    bucket = Connection.from_environment(emulator.env).bucket
    told: list[str] = []
    book = GcsLeaseBook(bucket, told.append)
    kept = await book.create(lease("a"))
    write(f"{bucket}/pools/p/slices/odd.json", b"{")
    for _ in range(2):
        assert await book.list("p") == [kept]
    assert len(told) == 1
    assert "odd.json" in told[0]
    with pytest.raises(MalformedLease, match="odd"):  # who puts a project in order has to know
        await GcsLeaseBook(bucket).list("p")


async def test_settings_have_defaults_are_changed_one_at_a_time_and_checked(book: LeaseBook):
    assert await book.settings("p") == PoolSettings()
    await book.set_settings("p", lambda s: PoolSettings(idle_minutes=5, max_slices=s.max_slices))
    changed = await book.set_settings("p", lambda s: PoolSettings(s.idle_minutes, 1, 3, candidates=(V4,)))
    assert changed == await book.settings("p") == PoolSettings(5, 1, 3, candidates=(V4,))
    with pytest.raises(PoolSettingsError, match="more than max_slices"):
        PoolSettings(min_slices=2, max_slices=1, candidates=(V4,))
    with pytest.raises(PoolSettingsError, match="0 or more"):
        PoolSettings(idle_minutes=-1)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"idle_minutes": null}', '{"max_slices": 1.5}', '{"evict_minutes": "10"}', '{"min_slices": true}'],
)  # fmt: skip
def test_settings_that_somebody_wrote_by_hand_are_checked(content: str):
    with pytest.raises(PoolSettingsError, match=r"pool\.json cannot be understood"):
        PoolSettings.from_json(content.encode())
