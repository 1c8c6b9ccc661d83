"""Since when the slices are there that trials have used, and until when: as their leases say it."""

from __future__ import annotations

from collections.abc import Collection

from tpu.slices.lease import Lease
from tpu.slices.lease_book import LeaseBook
from tpu.sweeps.usage import SliceLife


class SliceLives:
    """Reads leases of one pool; that of a slice that is gone is read once."""

    def __init__(self, book: LeaseBook, pool: str) -> None:
        self._book = book
        self._pool = pool
        self._past: dict[str, SliceLife] = {}

    async def of(self, slices: Collection[str], now: float) -> dict[str, SliceLife]:
        """The lives of these slices, up to `now` (seconds since 1970) of those that are there; of one that was never
        ready there is none. May raise tpu.checkpoint.retry.StorageUnavailable."""
        wanted = {name for name in slices if name not in self._past}
        found = {name: self._past[name] for name in slices if name in self._past}
        if not wanted:
            return found
        for lease in [kept.lease for kept in await self._book.list(self._pool)]:
            if lease.slice in wanted and (life := _life(lease, now)) is not None:
                found[lease.slice] = life
        for name in wanted - found.keys():
            kept = await self._book.read(self._pool, name)
            if kept is not None and (life := _life(kept.lease, now)) is not None:
                found[name] = life
                if kept.lease.gone is not None:
                    self._past[name] = life
        return found


def _life(lease: Lease, now: float) -> SliceLife | None:
    if lease.ready is None:
        return None
    return SliceLife(lease.chips, lease.ready, now if lease.gone is None else lease.gone)
