"""One value that several processes change, in the emulator's bucket."""

from __future__ import annotations

import asyncio

import pytest

from tpu.checkpoint import files, objects
from tpu.clock import SystemClock
from tpu.emulator.emulator import Emulator
from tpu.slices.candidate import Candidate
from tpu.slices.project_memory import memory_of_bucket
from tpu.slices.shared import BucketShared, MalformedShared
from tpu.slices.zone_health import Closed, Fine, Slowed

CANDIDATE = Candidate("us-east5-a", "v6e-8", "spot")


class FastClock(SystemClock):
    """Sleeps a tenth as long."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 10)


def counter(emulator: Emulator) -> BucketShared[int]:
    return BucketShared(f"{emulator.env['TPU_RELAY_BUCKET']}/pools/n.json", int, int, 0, FastClock())


def next_number(value: int) -> tuple[int, int]:
    return value + 1, value + 1


async def test_of_all_who_change_it_none_is_lost(emulator: Emulator) -> None:
    processes = [counter(emulator) for _ in range(4)]
    answers = await asyncio.gather(*(one.change(next_number) for one in processes for _ in range(10)))
    assert sorted(answers) == list(range(1, 41))
    assert await counter(emulator).read() == 40


async def test_changes_that_come_together_are_one_write(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    really = objects.compare_and_set
    monkeypatch.setattr(objects, "compare_and_set", lambda *args: (written.append(args[0]), really(*args))[1])
    shared = counter(emulator)
    await shared.change(next_number)
    await asyncio.gather(*(shared.change(next_number) for _ in range(50)))
    assert len(written) == 1
    # What changes nothing is not written.
    await shared.change(lambda value: (value, None))
    assert len(written) == 1


async def test_one_who_gives_up_waiting_breaks_nobody(emulator: Emulator) -> None:
    shared = counter(emulator)
    await shared.change(next_number)
    impatient = asyncio.create_task(shared.change(next_number))
    patient = asyncio.create_task(shared.change(next_number))
    await asyncio.sleep(0)  # let the writer begin
    impatient.cancel()
    assert await patient in (2, 3)


async def test_a_damaged_object_is_named(emulator: Emulator) -> None:
    url = f"{emulator.env['TPU_RELAY_BUCKET']}/pools/zone-health.json"
    files.write(url, b'{"us-east5-a/v6e-8": {}}')
    memory = memory_of_bucket(emulator.env["TPU_RELAY_BUCKET"], SystemClock())
    for asked in (memory.let_through(CANDIDATE), memory.note(CANDIDATE, "stockout", 0.0)):
        with pytest.raises(MalformedShared, match=r"zone-health.json cannot be understood.*may be deleted"):
            await asked


async def test_what_one_process_learns_of_a_zone_all_know(emulator: Emulator) -> None:
    bucket, clock = emulator.env["TPU_RELAY_BUCKET"], SystemClock()
    one, other = memory_of_bucket(bucket, clock), memory_of_bucket(bucket, clock)
    assert await one.let_through(CANDIDATE) == Fine()
    await one.note(CANDIDATE, "stockout", clock.time())
    assert isinstance(await other.let_through(CANDIDATE), Slowed)
    await other.note(CANDIDATE, "success", clock.time())
    assert await one.let_through(CANDIDATE) == Fine()
    await one.note_no_quota(CANDIDATE, "TPUV6E")
    assert await other.let_through(CANDIDATE) == Closed("TPUV6E")
    await other.forget("us-east5-a")
    assert await one.let_through(CANDIDATE) == Fine()


async def test_V5_creations_of_all_processes_share_one_bucket(emulator: Emulator) -> None:
    bucket, clock = emulator.env["TPU_RELAY_BUCKET"], SystemClock()
    one, other = memory_of_bucket(bucket, clock), memory_of_bucket(bucket, clock)
    first = await asyncio.gather(*(one.reserve_creation() for _ in range(12)))
    assert first == [0.0] * 12
    assert await other.reserve_creation() > 0
    await other.creation_refused()
    assert await one.reserve_creation() > 1
