"""The fleet: a table of all slices of a bucket's pools, as an artifact with one history."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prefect.artifacts import acreate_table_artifact

from tpu.checkpoint import objects
from tpu.checkpoint.retry import StorageUnavailable
from tpu.runs.event_log import RunEvent
from tpu.slices.fleet import fleet_rows, fleet_summary
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import NAME_PATTERN

# A run looks so often whether its slices have changed, and tells at most every so many seconds that they have.
LOOK_S, LEAST_PAUSE_S = 2.0, 60.0
# Nobody who cancels a run waits longer for a table.
PUBLISH_S = 10.0
_CHANGES = ("slice-intended", "slice-ready", "slice-leased", "slice-released", "slice-deleted")


async def publish_fleet(bucket: str, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
    """Read the leases of all pools and publish the table. What cannot be read is said, and ends nothing."""
    try:
        pools = await asyncio.to_thread(objects.folders, f"{bucket}/pools")
        book = GcsLeaseBook(bucket, log.warning)
        kept = [one for name in pools if re.fullmatch(NAME_PATTERN, name) for one in await book.list(name)]
        leases, now = [one.lease for one in kept], time.time()
        async with asyncio.timeout(PUBLISH_S):
            await acreate_table_artifact(
                fleet_rows(leases, now), key=fleet_key(bucket), description=fleet_summary(leases, bucket, now)
            )
    except StorageUnavailable as error:
        log.warning("the fleet table is as it was: %s", error)
    except Exception as error:  # a table must never end a training, nor keep a reaper from its work
        log.debug("the fleet table was not published: %r", error)


def fleet_key(bucket: str) -> str:
    """Of all tables of one bucket the same, of another bucket another one."""
    return "slices-in-" + re.sub("[^a-z0-9]+", "-", bucket.removeprefix("gs://").lower()).strip("-")


@contextlib.asynccontextmanager
async def fleet_told(
    bucket: str, events: Sequence[RunEvent], log: logging.Logger | logging.LoggerAdapter[Any]
) -> AsyncIterator[None]:
    """Publish the table for the block whenever the slices of a run change by its growing `events`, and at its end."""
    told, at = 0, -LEAST_PAUSE_S

    async def tell() -> None:
        nonlocal told, at
        changes, now = sum(event.kind in _CHANGES for event in events), time.monotonic()
        if changes != told:
            told, at = changes, now
            await publish_fleet(bucket, log)

    async def keep_telling() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - at >= LEAST_PAUSE_S:
                await tell()

    telling = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await tell()
