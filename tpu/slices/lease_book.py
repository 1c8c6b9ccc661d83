"""Where the leases of a pool are kept: the bucket, or memory for simulations, with the same compare-and-set.

A lease that is gone says so in the labels of its object, so that listing a pool of many past slices reads only those
that still exist; of these, only those that changed since the last look.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol

from tpu.checkpoint import objects
from tpu.slices import lease as leases
from tpu.slices.lease import Lease, LeaseRefused, LeaseState
from tpu.slices.pool_settings import PoolSettings

READERS = 16
STATE_LABEL = "state"
# Others may change a lease between our reading and writing; each time it is read again.
MOST_TRIES = 50


class LeaseExists(Exception):
    """A slice of this name has been there before: names never recur, so somebody else made it."""


class LeaseContended(Exception):
    """Others changed a lease at each of many tries."""


@dataclass(frozen=True)
class Kept:
    """A lease as it is kept, with the generation that a change must name."""

    lease: Lease
    generation: int


class LeaseBook(Protocol):
    """The leases of all pools. Every method may raise tpu.checkpoint.retry.StorageUnavailable."""

    async def list(self, pool: str, *, past: bool = False) -> list[Kept]:
        """The leases of a pool by slice; those of slices that are gone only if `past`."""
        ...

    async def read(self, pool: str, slice: str) -> Kept | None: ...

    async def create(self, lease: Lease) -> Kept:
        """Raises LeaseExists if there is or was a slice of this name."""
        ...

    async def change(self, lease: Lease, generation: int) -> Kept:
        """Raises tpu.checkpoint.objects.StaleGeneration if somebody else changed it."""
        ...

    async def settings(self, pool: str) -> PoolSettings: ...

    async def set_settings(self, pool: str, change: Callable[[PoolSettings], PoolSettings]) -> PoolSettings:
        """Apply a change to the settings of a pool, anew as often as others come first."""
        ...


async def update(book: LeaseBook, pool: str, slice: str, change: Callable[[Lease], Lease]) -> Kept:
    """Apply a pure change to a lease, anew as often as others come first; writes nothing if nothing changes.

    Raises:
        LeaseRefused: `change` refused, or there is no such lease.
        LeaseContended: others came first every time.
    """
    for attempt in range(MOST_TRIES):
        kept = await book.read(pool, slice)
        if kept is None:
            raise LeaseRefused(f"there is no lease of {slice} in the pool {pool}")
        after = change(kept.lease)
        if after == kept.lease:
            return kept
        try:
            return await book.change(after, kept.generation)
        except objects.StaleGeneration:
            await asyncio.sleep(min(0.02 * attempt, 0.5))  # let the others be done
    raise LeaseContended(f"others changed the lease of {slice} at each of {MOST_TRIES} tries")


class GcsLeaseBook:
    """Leases as `<bucket>/pools/<pool>/slices/<slice>.json`, settings as `<bucket>/pools/<pool>/pool.json`."""

    def __init__(self, bucket: str, on_damaged: Callable[[str], None] | None = None) -> None:
        """With `on_damaged` lists leave out what cannot be read, and it is told of each once; else they raise."""
        self._bucket = bucket.rstrip("/")
        self._known: dict[tuple[str, bool], dict[str, Kept]] = {}
        self._on_damaged = on_damaged
        self._told: set[str] = set()

    async def list(self, pool: str, *, past: bool = False) -> list[Kept]:
        return await asyncio.to_thread(self._list, pool, past)

    def _list(self, pool: str, past: bool) -> list[Kept]:
        found = [
            listed
            for listed in objects.entries(f"{self._bucket}/pools/{pool}/slices")
            if past or listed.labels.get(STATE_LABEL) != LeaseState.GONE.value
        ]
        before = self._known.get((pool, past), {})
        same = {
            listed.url: before[listed.url]
            for listed in found
            if listed.url in before and before[listed.url].generation == listed.generation
        }
        changed = [listed.url for listed in found if listed.url not in same]
        read: list[Kept | None] = []
        if changed:
            with ThreadPoolExecutor(min(READERS, len(changed))) as readers:
                read = list(readers.map(self._read_or_tell, changed))
        known = same | {url: kept for url, kept in zip(changed, read, strict=True) if kept is not None}
        self._known[pool, past] = known
        kept = (known[listed.url] for listed in found if listed.url in known)
        # One may have gone between the listing and the reading.
        return [one for one in kept if past or one.lease.state is not LeaseState.GONE]

    def _read_or_tell(self, url: str) -> Kept | None:
        try:
            return self._read(url)
        except leases.MalformedLease as error:
            if self._on_damaged is None:
                raise
            if url not in self._told:
                self._told.add(url)
                self._on_damaged(f"a slice of the pool is left alone, since its lease is damaged: {error}")
            return None

    async def read(self, pool: str, slice: str) -> Kept | None:
        return await asyncio.to_thread(self._read, self._url(pool, slice))

    @staticmethod
    def _read(url: str) -> Kept | None:
        found = objects.read(url)
        return Kept(_parsed(url, found[0]), found[1]) if found else None

    async def create(self, lease: Lease) -> Kept:
        url = self._url(lease.pool, lease.slice)
        try:
            generation = await asyncio.to_thread(
                objects.create_exclusive, url, leases.to_json(lease), _labels(lease)
            )
        except objects.ObjectExists as error:
            raise LeaseExists(f"{lease.slice} has a lease already: {error}") from error
        return Kept(lease, generation)

    async def change(self, lease: Lease, generation: int) -> Kept:
        url = self._url(lease.pool, lease.slice)
        after = await asyncio.to_thread(
            objects.compare_and_set, url, leases.to_json(lease), generation, _labels(lease)
        )
        return Kept(lease, after)

    async def settings(self, pool: str) -> PoolSettings:
        found = await asyncio.to_thread(objects.read, self._settings_url(pool))
        return PoolSettings.from_json(found[0]) if found else PoolSettings()

    async def set_settings(self, pool: str, change: Callable[[PoolSettings], PoolSettings]) -> PoolSettings:
        return await asyncio.to_thread(self._set_settings, pool, change)

    def _set_settings(self, pool: str, change: Callable[[PoolSettings], PoolSettings]) -> PoolSettings:
        url = self._settings_url(pool)
        for _ in range(MOST_TRIES):
            found = objects.read(url)
            after = change(PoolSettings.from_json(found[0]) if found else PoolSettings())
            data = json.dumps(asdict(after), indent=1).encode()
            try:
                if found is None:
                    objects.create_exclusive(url, data)
                else:
                    objects.compare_and_set(url, data, found[1])
                return after
            except (objects.ObjectExists, objects.StaleGeneration):
                continue
        raise LeaseContended(f"others changed {url} at each of {MOST_TRIES} tries")

    def _url(self, pool: str, slice: str) -> str:
        return f"{self._bucket}/pools/{pool}/slices/{slice}.json"

    def _settings_url(self, pool: str) -> str:
        return f"{self._bucket}/pools/{pool}/pool.json"


class MemoryLeaseBook:
    """Leases in memory, for simulations and tests: one process, the same generations and refusals."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Kept]] = {}
        self._living: dict[str, dict[str, Kept]] = {}
        self._settings: dict[str, PoolSettings] = {}
        self._generations = itertools.count(1)

    async def list(self, pool: str, *, past: bool = False) -> list[Kept]:
        return list((self._kept if past else self._living).get(pool, {}).values())

    async def read(self, pool: str, slice: str) -> Kept | None:
        return self._kept.get(pool, {}).get(slice)

    async def create(self, lease: Lease) -> Kept:
        if lease.slice in self._kept.get(lease.pool, {}):
            raise LeaseExists(f"{lease.slice} has a lease already")
        return self._keep(lease)

    async def change(self, lease: Lease, generation: int) -> Kept:
        before = self._kept.get(lease.pool, {}).get(lease.slice)
        if before is None or before.generation != generation:
            raise objects.StaleGeneration(f"{lease.slice} has another generation than {generation}")
        return self._keep(lease)

    async def settings(self, pool: str) -> PoolSettings:
        return self._settings.get(pool, PoolSettings())

    async def set_settings(self, pool: str, change: Callable[[PoolSettings], PoolSettings]) -> PoolSettings:
        self._settings[pool] = change(await self.settings(pool))
        return self._settings[pool]

    def _keep(self, lease: Lease) -> Kept:
        kept = Kept(lease, next(self._generations))
        self._kept.setdefault(lease.pool, {})[lease.slice] = kept
        living = self._living.setdefault(lease.pool, {})
        if lease.state is LeaseState.GONE:
            living.pop(lease.slice, None)
        else:
            living[lease.slice] = kept
        return kept


def _labels(lease: Lease) -> dict[str, str]:
    return {STATE_LABEL: lease.state.value}


def _parsed(url: str, data: bytes) -> Lease:
    try:
        return leases.from_json(data)
    except leases.MalformedLease as error:
        raise leases.MalformedLease(f"{url}: {error}") from error
