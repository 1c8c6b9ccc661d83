"""Delete what a pool does not keep, as soon as who used it knows that it is not needed any more."""

from __future__ import annotations

from collections.abc import Callable

from tpu.clock import Clock
from tpu.cloud import TpuCloud
from tpu.slices import lease as leases
from tpu.slices.deletion import delete_slice
from tpu.slices.lease import LeaseRefused, LeaseState
from tpu.slices.lease_book import LeaseBook, update
from tpu.slices.pool_size import idle_too_long

DELETE_S = 1800.0


async def delete_idle(
    pool: str, cloud: TpuCloud, book: LeaseBook, clock: Clock, report: Callable[[str], None]
) -> None:
    """Delete the slices of a pool that nobody holds or claims and its settings do not keep.

    Raises:
        tpu.cloud.errors.CloudError, tpu.slices.deletion.DeletionUnconfirmed: the reaper deletes what is left.
    """
    kept, settings = await book.list(pool), await book.settings(pool)
    why = "nobody of its pool needs it any more"
    zones = {one.lease.slice: one.lease.candidate.zone for one in kept}
    for name in idle_too_long((one.lease for one in kept), settings, clock.time()):
        try:
            closed = await update(book, pool, name, lambda lease: leases.retire(lease, why))
        except LeaseRefused:
            continue  # somebody was quicker
        if closed.lease.state is LeaseState.GONE:
            continue
        report(f"deleting slice {name}: {why}")
        await delete_slice(cloud, zones[name], name, clock, DELETE_S)
        await update(book, pool, name, lambda lease: leases.gone(lease, why, clock.time()))
