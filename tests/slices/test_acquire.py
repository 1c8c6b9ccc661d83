"""One slice out of several candidates, against the emulator: order, races, refusals, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.slices.test_provision import FastClock, always, nothing_is_left, until
from tpu.checkpoint import files
from tpu.clock import Clock, SystemClock
from tpu.cloud import CloudError, ErrorKind
from tpu.cloud.google import GoogleTpuCloud
from tpu.emulator.emulator import Emulator
from tpu.slices.acquire import Answer, Wish, acquire, answer_to
from tpu.slices.candidate import Candidate
from tpu.slices.creation_rate import RateLimit
from tpu.slices.labels import ownership_labels
from tpu.slices.project_memory import ProjectMemory, memory_of_bucket, memory_of_process
from tpu.slices.provision import NoLongerWanted, NotReady, ReadySlice, provision
from tpu.slices.request import SliceRequest
from tpu.slices.waiting import Waiting
from tpu.slices.zone_health import Fine, Slowed, permission

A = Candidate("us-east5-a", "v6e-1", "spot")
B = Candidate("us-east5-b", "v6e-1", "spot")
C = Candidate("us-east1-d", "v6e-1", "on-demand")
REQUEST = SliceRequest(
    A.zone, A.accelerator_type, labels=ownership_labels("test", "pytest", "a-run"), deadline_s=60
)


@dataclass
class Book:
    """Remembers what was asked for, under names as a run gives them."""

    prefix: str = "s"
    asked: list[Candidate] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    told: dict[str, tuple[str, bool, bool]] = field(default_factory=dict)
    unwanted: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=SystemClock)

    async def intended(self, candidate: Candidate) -> str:
        self.asked.append(candidate)
        self.times.append(self.clock.monotonic())
        name = f"{self.prefix}{len(self.asked)}"
        await asyncio.sleep(0.001)  # as a bucket takes
        return name

    async def given_up(self, name: str, why: str) -> None:
        self.unwanted.append(name)

    async def ended(self, name: str, why: str, *, deleted: bool, preempted: bool) -> None:
        assert name not in self.told
        self.told[name] = (why, deleted, preempted)

    @property
    def left(self) -> list[str]:
        """Slices that nobody has said to be gone."""
        names = [f"{self.prefix}{number}" for number in range(1, len(self.asked) + 1)]
        return [name for name in names if name not in self.told or not self.told[name][1]]


async def get(
    cloud: GoogleTpuCloud,
    *candidates: Candidate,
    book: Book | None = None,
    memory: ProjectMemory | None = None,
    clock: Clock | None = None,
    said: list[str] | None = None,
    still_wanted: Callable[[], Awaitable[None]] = always,
    waiting: Waiting | None = None,
    deadline_s: float = 60,
    beside: Callable[[Coroutine[Any, Any, None]], object] | None = None,
    **wish: Any,
) -> ReadySlice:
    clock = clock or SystemClock()
    return await acquire(
        cloud,
        Wish(candidates, dataclasses.replace(REQUEST, deadline_s=deadline_s), **wish),
        book or Book(),
        memory or memory_of_process(clock),
        clock,
        said.append if said is not None else lambda line: None,
        still_wanted,
        waiting=waiting,
        chance=random.Random(1),
        beside=beside,
    )


def zones_of(emulator: Emulator) -> list[str]:
    return sorted(node["zone"] for node in emulator.nodes())


def block(emulator: Emulator, *candidates: Candidate) -> None:
    """Let these candidates wait in their queues for ever."""
    for candidate in candidates:
        emulator.set_capacity(candidate.zone, candidate.accelerator_type, 0)


def sell_out(emulator: Emulator, *candidates: Candidate, on: bool = True) -> None:
    for candidate in candidates:
        emulator.stockout(candidate.zone, candidate.accelerator_type, on)


async def test_the_first_candidate_that_can_be_had_is_had(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    book = Book()
    ready = await get(cloud, A, B, book=book)
    assert (ready.name, ready.zone, book.asked, book.told) == ("s1", A.zone, [A], {})
    assert ready.request.accelerator_type == "v6e-1"


async def test_V1_after_a_stockout_the_next_candidate_is_asked_at_once(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    sell_out(emulator, A, B)
    book, memory, clock = Book(), memory_of_process(SystemClock()), SystemClock()
    began = clock.monotonic()
    ready = await get(cloud, A, B, C, book=book, memory=memory)
    assert ready.zone == C.zone
    assert book.asked == [A, B, C]
    assert clock.monotonic() - began < 5
    assert all("no capacity" in why and deleted for why, deleted, _ in book.told.values())
    assert zones_of(emulator) == [C.zone]
    health = await memory.health()
    assert isinstance(permission(health.of(A), clock.time()), Slowed)
    assert permission(health.of(C), clock.time()) == Fine()


async def test_V1_all_of_them_sold_out_they_are_asked_less_and_less_often(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    clock = FastClock()
    sell_out(emulator, A, B)
    book, said = Book(clock=clock), []
    getting = asyncio.create_task(get(cloud, A, B, book=book, clock=clock, said=said, deadline_s=1e6))
    await until(lambda: len(book.asked) >= 18, "nine rounds")
    sell_out(emulator, A, B, on=False)
    await getting
    for place in (A, B):
        times = [t for t, asked in zip(book.times, book.asked, strict=True) if asked == place]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps[3] > 7  # slowed down
        assert gaps[7] > 110  # halted
    assert any("asked for more slowly" in line for line in said)
    assert any("not asked for at present" in line for line in said)
    assert len(emulator.nodes()) == 1


async def test_V1_another_run_does_not_try_what_the_project_knows_to_be_sold_out(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    memory, clock = memory_of_process(SystemClock()), SystemClock()
    for _ in range(4):
        await memory.note(A, "stockout", clock.time())
    book = Book()
    ready = await get(cloud, A, B, book=book, memory=memory)
    assert (ready.zone, book.asked) == (B.zone, [B])


async def test_V2_a_candidate_without_quota_is_dropped_for_good_and_its_quota_named(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_quota(A.zone, A.accelerator_type, 0)
    said: list[str] = []
    book, memory = Book(), memory_of_process(SystemClock())
    ready = await get(cloud, A, B, book=book, memory=memory, said=said)
    assert (ready.zone, book.asked) == (B.zone, [A, B])
    (line,) = [line for line in said if line.startswith(f"{A}: given up")]
    assert "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI" in line
    assert (await memory.health()).of(A).no_quota == "TPUV6EPreemptiblePerProjectPerRegionForTPUAPI"
    # No other run asks, and one that has nowhere else to go says so before anything is made.
    other = Book("o")
    with pytest.raises(CloudError, match=r"TPUV6EPreemptible.*relay zones --forget us-east5-a") as caught:
        await get(cloud, A, book=other, memory=memory)
    assert caught.value.kind is ErrorKind.NO_QUOTA
    assert other.asked == []


async def test_V2_when_all_are_dropped_the_error_names_each(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    for candidate in (A, C):
        emulator.set_quota(candidate.zone, candidate.accelerator_type, 0)
    unknown = Candidate("us-east5-z", "v6e-1", "spot")
    with pytest.raises(CloudError) as caught:
        await get(cloud, A, unknown, C)
    assert caught.value.permanent
    for part in (str(A), "TPUV6EPreemptible", str(unknown), "us-east5-z", str(C), "TPUV6EPerProject"):
        assert part in str(caught.value)
    assert nothing_is_left(emulator)


@pytest.mark.parametrize("run", ["a-run", "another-run"], ids=["the run's own", "another run's"])
async def test_V3_own_dead_slices_that_use_up_the_quota_are_deleted_first(
    cloud: GoogleTpuCloud, emulator: Emulator, run: str
) -> None:
    clock = FastClock()
    emulator.set_quota(A.zone, A.accelerator_type, 1)
    labels = ownership_labels("test", "pytest", run)
    await provision(cloud, dataclasses.replace(REQUEST, labels=labels), "old", clock, print, always)
    await asyncio.to_thread(emulator.preempt, "old")
    said: list[str] = []
    book = Book()
    ready = await get(cloud, A, book=book, clock=clock, said=said, deadline_s=5000)
    assert (ready.name, book.asked) == ("s2", [A, A])
    assert any("deleted old, which was dead" in line for line in said)
    assert [node["node"] for node in emulator.nodes()] == ["s2"]


async def test_V3_what_lives_or_is_not_ours_is_never_deleted_for_its_quota(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    clock = FastClock()
    emulator.set_quota(A.zone, A.accelerator_type, 2)
    labels = ownership_labels("someone-else", "pytest")
    await provision(cloud, dataclasses.replace(REQUEST, labels=labels), "theirs", clock, print, always)
    await asyncio.to_thread(emulator.preempt, "theirs")
    await provision(cloud, REQUEST, "alive", clock, print, always)
    with pytest.raises(NotReady, match="quota used up"):
        await get(cloud, A, clock=clock, deadline_s=100)
    assert sorted(node["node"] for node in emulator.nodes()) == ["alive", "theirs"]


async def test_in_a_race_the_first_that_is_ready_wins_and_the_others_are_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A, B)
    emulator.set_delete_delay(0.5)
    book = Book()
    ready = await get(cloud, A, B, C, book=book, race=3)
    assert ready.zone == C.zone
    assert sorted(map(str, book.asked)) == sorted(map(str, (A, B, C)))
    # Not only asked to go: the cloud knows nothing else any more.
    assert [node["node"] for node in emulator.nodes()] == [ready.name]
    assert [queued["queued_resource"] for queued in emulator.queued_resources()] == [ready.name]
    assert book.left == [ready.name]
    assert all(deleted and not preempted for _, deleted, preempted in book.told.values())


async def test_the_winner_of_a_race_is_had_at_once_and_the_losers_are_deleted_beside(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A, B)
    emulator.set_delete_delay(0.5)
    book, ending = Book(), list[asyncio.Task[None]]()
    ready = await get(
        cloud, A, B, C, book=book, race=3, beside=lambda work: ending.append(asyncio.create_task(work))
    )
    assert ready.zone == C.zone
    # Written down before the slice is used: who finds the losers in the book deletes them.
    assert book.left == ["s1", "s2", "s3"]
    assert sorted([*book.unwanted, ready.name]) == ["s1", "s2", "s3"]
    assert len(emulator.queued_resources()) == 3
    (losers,) = ending
    await until(lambda: [q["state"] for q in emulator.queued_resources()].count("DELETING") == 2, "the end")
    losers.cancel()  # as a flow that ends: it is broken off by nothing
    with contextlib.suppress(asyncio.CancelledError):
        await losers
    assert book.left == [ready.name]
    assert [queued["queued_resource"] for queued in emulator.queued_resources()] == [ready.name]


async def test_of_two_that_are_ready_at_once_one_is_deleted(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    for number in range(5):
        book = Book(f"r{number}-")
        ready = await get(cloud, A, B, C, book=book, race=3)
        assert book.left == [ready.name]
        assert [node["node"] for node in emulator.nodes()] == [ready.name]
        await cloud.delete_queued_resource(ready.zone, ready.name)
        await until(lambda: nothing_is_left(emulator), "it is gone")


async def test_in_a_race_a_refused_one_is_replaced_by_the_next(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A)
    sell_out(emulator, B)
    book = Book()
    ready = await get(cloud, A, B, C, book=book, race=2)
    assert ready.zone == C.zone
    assert book.asked.index(C) == 2
    assert [node["node"] for node in emulator.nodes()] == [ready.name]


@pytest.mark.parametrize("race", [1, 3])
async def test_V7_cancelled_at_any_moment_nothing_is_left(
    cloud: GoogleTpuCloud, emulator: Emulator, race: int
) -> None:
    emulator.set_delay(0.15)
    block(emulator, B)
    for number, moment_s in enumerate([0.0, 0.002, 0.01, 0.03, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4]):
        book = Book(f"r{number}-")
        getting = asyncio.create_task(get(cloud, A, B, C, book=book, race=race))
        await asyncio.wait({getting}, timeout=moment_s)
        getting.cancel()
        try:
            ready = await getting
        except asyncio.CancelledError:
            assert book.left == []
        else:
            assert book.left == [ready.name]
            await cloud.delete_queued_resource(ready.zone, ready.name)
            await until(lambda: nothing_is_left(emulator), "it is gone")
        assert nothing_is_left(emulator)


async def test_V7_no_longer_wanted_in_a_race_nothing_is_left(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A, B)
    wanted, book = True, Book()

    async def check() -> None:
        if not wanted:
            raise NoLongerWanted("the run was stopped")

    getting = asyncio.create_task(get(cloud, A, B, book=book, race=2, still_wanted=check))
    await until(lambda: len(emulator.queued_resources()) == 2, "both are asked for")
    wanted = False
    with pytest.raises(NoLongerWanted):
        await getting
    assert book.left == []
    assert nothing_is_left(emulator)


async def test_C6_who_lost_the_right_to_act_deletes_nothing(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    class NotOurs(Exception):
        pass

    block(emulator, A, B)
    ours, book = True, Book()

    async def check() -> None:
        if not ours:
            raise NotOurs

    getting = asyncio.create_task(get(cloud, A, B, book=book, race=2, still_wanted=check))
    await until(lambda: len(emulator.queued_resources()) == 2, "both are asked for")
    ours = False
    with pytest.raises(NotOurs):
        await getting
    assert len(emulator.queued_resources()) == 2
    assert book.left == ["s1", "s2"]


async def test_P2_preempted_while_being_made_it_is_made_again_and_never_twice(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_delay(20)
    book = Book()
    getting = asyncio.create_task(get(cloud, A, book=book))
    await until(lambda: any(n["state"] == "CREATING" for n in emulator.nodes()), "it is being made")
    emulator.set_delay(0)
    await asyncio.to_thread(emulator.preempt, "s1")
    ready = await getting
    assert (ready.name, book.asked) == ("s2", [A, A])
    assert book.told["s1"][1:] == (True, True)
    assert [node["node"] for node in emulator.nodes()] == ["s2"]


async def test_V4_the_deadline_is_one_for_all_and_says_of_each_why(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A)
    sell_out(emulator, B)
    emulator.set_quota(C.zone, C.accelerator_type, 0)
    waiting, book = Waiting(), Book()
    getting = asyncio.create_task(get(cloud, A, B, C, book=book, race=2, waiting=waiting, deadline_s=1.5))
    await until(lambda: len(book.asked) >= 3 and len(waiting.sentences) == 3, "all were asked")
    await until(lambda: "given up" in waiting.sentences.get(str(C), ""), "the one is given up")
    said = waiting.sentences
    assert said[str(A)] == "waiting for capacity"
    assert "no capacity" in said[str(B)]
    with pytest.raises(NotReady) as caught:
        await getting
    for part in (f"{A}: waiting for capacity", f"{B}: ", f"{C}: given up", "TPUV6EPerProject"):
        assert part in str(caught.value)
    assert not caught.value.retryable
    assert nothing_is_left(emulator)
    assert waiting.sentences == {}


async def test_a_full_queue_is_left_for_the_next_candidate(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    block(emulator, A)
    book = Book()
    ready = await get(cloud, A, B, book=book, queue_patience_s=0.3)
    assert (ready.zone, book.asked) == (B.zone, [A, B])
    assert [node["node"] for node in emulator.nodes()] == [ready.name]


async def test_the_last_candidate_is_waited_for_in_its_queue(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    block(emulator, A)
    emulator.set_quota(B.zone, B.accelerator_type, 0)
    book = Book()
    getting = asyncio.create_task(get(cloud, B, A, book=book, queue_patience_s=0.2))
    await until(lambda: book.asked == [B, A], "only one is left")
    await asyncio.sleep(0.6)  # three times its patience, in which nothing is to happen
    emulator.set_capacity(A.zone, A.accelerator_type, None)
    assert (await getting).name == "s2"


async def test_V5_many_at_once_keep_to_the_project_s_rate(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    clock = FastClock()
    memory = memory_of_process(clock, RateLimit(a_minute=6, burst=1))
    book = Book(clock=clock)
    await asyncio.gather(
        *(get(cloud, A, book=book, memory=memory, clock=clock, deadline_s=1e5) for _ in range(5))
    )
    gaps = [later - earlier for earlier, later in itertools.pairwise(book.times)]
    assert min(gaps) > 5  # ten seconds each, on a clock that runs fast
    assert len(emulator.nodes()) == 5


async def test_V5_refused_as_too_fast_all_wait(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    clock = FastClock()
    emulator.set_creation_rate(1)
    book = Book(clock=clock)
    memory = memory_of_process(clock)
    await get(cloud, A, book=book, memory=memory, clock=clock, deadline_s=1e5)
    getting = asyncio.create_task(get(cloud, A, book=book, memory=memory, clock=clock, deadline_s=1e5))
    await until(lambda: len(book.told) >= 1, "it is refused")
    emulator.set_creation_rate(91)
    await getting
    assert "too many requests" in book.told["s2"][0]


async def test_the_emulator_s_own_bucket_remembers(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    sell_out(emulator, A)
    bucket, clock = emulator.env["TPU_RELAY_BUCKET"], SystemClock()
    await get(cloud, A, B, memory=memory_of_bucket(bucket, clock))
    health = await memory_of_bucket(bucket, clock).health()
    assert [outcome.kind for outcome in health.of(A).outcomes] == ["stockout"]
    assert health.of(B).outcomes == ()


async def test_a_memory_that_is_damaged_is_told_and_done_without(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    bucket = emulator.env["TPU_RELAY_BUCKET"]
    for name in ("zone-health", "creation-rate"):
        files.write(f"{bucket}/pools/{name}.json", b"[")
    said: list[str] = []
    sell_out(emulator, A)
    ready = await get(cloud, A, B, memory=memory_of_bucket(bucket, SystemClock()), said=said)
    assert ready.zone == B.zone
    assert any("zone-health.json cannot be understood" in line for line in said)


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_refusal_has_an_answer(kind: ErrorKind):
    answer = answer_to(kind)
    # What no repetition changes is dropped, and nothing else.
    assert (answer is Answer.DROP) == CloudError(kind, 0, "").permanent
    if kind in (ErrorKind.STOCKOUT, ErrorKind.INTERNAL, ErrorKind.UNAVAILABLE, ErrorKind.UNKNOWN):
        assert answer is Answer.LATER
