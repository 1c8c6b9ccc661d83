"""Why a run has no slice yet, where other processes can read it: one small object, there only while it waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tpu.checkpoint import files
from tpu.checkpoint.retry import RetryPolicy, StorageUnavailable
from tpu.clock import Clock
from tpu.slices.waiting import Waiting

# The bucket takes about one update a second of one object; a person who looks need not know at once.
WRITE_EVERY_S = 2.0
# It is not worth waiting for.
_POLICY = RetryPolicy(deadline_s=10.0)


@dataclass(frozen=True)
class SeenWaiting:
    """What was said at `time`, seconds since 1970 on the clock of the flow's machine, one line a candidate."""

    time: float
    lines: tuple[str, ...]


@contextlib.asynccontextmanager
async def shown_waiting(run_dir: str, clock: Clock) -> AsyncIterator[Waiting]:
    """What is said of a slice that is waited for, shown in the bucket until the block ends."""
    changed = asyncio.Event()
    waiting = Waiting(changed.set)

    async def write() -> None:
        while True:
            await changed.wait()
            changed.clear()
            with contextlib.suppress(StorageUnavailable):
                data = json.dumps({"time": clock.time(), "lines": waiting.lines()}).encode()
                await asyncio.to_thread(files.write, _url(run_dir), data, _POLICY)
            await clock.sleep(WRITE_EVERY_S)

    writer = asyncio.create_task(write())
    try:
        yield waiting
    finally:
        writer.cancel()
        # A write that was under way goes on in its thread; what is removed before it lands says when it was said.
        await asyncio.gather(writer, return_exceptions=True)
        with contextlib.suppress(StorageUnavailable, OSError):
            await asyncio.to_thread(files.remove, [_url(run_dir)], _POLICY)


def load_waiting(run_dir: str) -> SeenWaiting | None:
    """What a run waits for; None if it does not wait."""
    try:
        values = json.loads(files.read(_url(run_dir)))
        return SeenWaiting(float(values["time"]), tuple(map(str, values["lines"])))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _url(run_dir: str) -> str:
    return f"{run_dir}/waiting.json"
