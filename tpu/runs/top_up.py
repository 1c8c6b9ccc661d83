"""Ask for the slices that a pool lacks: a keeper at work for a while, taken up by the next pass of the reaper."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from tpu.clock import Clock
from tpu.cloud import TpuCloud
from tpu.connection import Connection
from tpu.hosts.identity import ensure_identity
from tpu.slices.keeper import Keeper
from tpu.slices.labels import flavour_of, ownership_labels
from tpu.slices.lease_book import LeaseBook
from tpu.slices.life import LifeState
from tpu.slices.monitor import Monitor
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_size import Option
from tpu.slices.project_memory import memory_of_bucket
from tpu.slices.request import SliceRequest

# So long a keeper may ask: what the cloud has not taken in by then, the next pass asks for.
TOP_UP_S, LOOK_S = 60.0, 0.5


async def top_up(
    pool: str,
    settings: PoolSettings,
    connection: Connection,
    cloud: TpuCloud,
    book: LeaseBook,
    clock: Clock,
    report: Callable[[str], None],
    *,
    for_s: float = TOP_UP_S,
) -> str | None:
    """Ask for what the pool lacks, and say what was asked for; None if it lacks nothing."""
    before = await _open(book, pool)
    lacking = settings.min_slices - len(before)
    if lacking <= 0:
        return None
    first = settings.candidates[0]
    identity = ensure_identity(connection.home)
    request = SliceRequest(
        zone=first.zone,
        accelerator_type=first.accelerator_type,
        provisioning=first.provisioning,
        metadata={"ssh-keys": f"{connection.ssh_user}:{identity.public_line}"},
        labels=ownership_labels(pool, connection.ssh_user, bucket=connection.bucket),
    )
    monitor = Monitor(cloud, clock)
    keeper = Keeper(
        pool=pool, options=[Option(candidate) for candidate in settings.candidates], request=request, cloud=cloud,
        book=book, memory=memory_of_bucket(connection.bucket, clock), monitor=monitor, clock=clock,
        uid=uuid.uuid4().hex, report=report, flavour=flavour_of(request),
    )  # fmt: skip
    task = asyncio.create_task(keeper.run())
    end = clock.monotonic() + for_s
    try:
        while clock.monotonic() < end and not task.done():
            await clock.sleep(LOOK_S)
            asked = await _open(book, pool) - before
            if len(asked) >= lacking and not keeper.counts()[LifeState.INTENDED]:
                break
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await monitor.close()
    asked = await _open(book, pool) - before
    told = f"pool {pool}: {len(before)} of {settings.min_slices} slices, asked for {len(asked)} more"
    why = "; ".join(f"{candidate}: {reason}" for candidate, reason in keeper.reasons.items())
    return told if len(asked) >= lacking or not why else f"{told} ({why})"


async def _open(book: LeaseBook, pool: str) -> set[str]:
    return {kept.lease.slice for kept in await book.list(pool) if kept.lease.open}
