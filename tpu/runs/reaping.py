"""Delete what nobody needs any more: look at the cloud, then at leases and drivers, watch who is silent, then act.

What is decided is decided by `tpu.slices.reaper`; here are the looks and the deeds. One part of the world that does
not answer (a zone, a lease, a run) is said, and the rest goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tpu.checkpoint import objects
from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError, Node, QueuedResource, TpuCloud
from tpu.runs.drivers import Drivers
from tpu.runs.event_log import note_from_outside
from tpu.runs.record import run_directory
from tpu.slices import lease as leases
from tpu.slices.condition import take_look
from tpu.slices.deletion import DeletionUnconfirmed, delete_slice
from tpu.slices.labels import POOL_LABEL, RUN_LABEL, is_ours, label_value
from tpu.slices.lease import (
    LEASE_TTL_S,
    Holder,
    Lease,
    LeaseObserver,
    LeaseRefused,
    LeaseState,
    MalformedLease,
    beat_of,
)
from tpu.slices.lease_book import LeaseBook, LeaseContended, update
from tpu.slices.pool_settings import PoolSettings, PoolSettingsError
from tpu.slices.reaper import (
    Deletion,
    Facts,
    Forgotten,
    Plan,
    Sighting,
    plan,
    runs_to_watch,
    sightings,
)

Item = TypeVar("Item")
Done = TypeVar("Done")

EVERY_ZONE = "-"
# Deletions at one time, and how long the cloud may take to confirm one. The next pass finds what it has not.
DELETIONS_AT_ONCE, DELETE_S = 16, 480.0
LOOKS_A_TTL, LONGEST_PAUSE_S = 8, 5.0
READERS = 16
# A lease can neither be read nor changed now: the next pass sees to it.
_NO_ANSWER = (LeaseContended, StorageUnavailable, MalformedLease)


@dataclass(frozen=True)
class Scope:
    """What a pass covers. `zones` are those to ask one by one if the cloud does not answer for all of them at once;
    those of the leases and of the pools' settings come on top."""

    bucket: str
    pool: str | None = None
    zones: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a deletion; `trouble` says why it is not confirmed, `spared` why it was not begun."""

    deletion: Deletion
    trouble: str | None = None
    spared: str | None = None

    @property
    def confirmed(self) -> bool:
        return self.trouble is None and self.spared is None


@dataclass
class Reaped:
    """One pass, decided at `time` (seconds since 1970). `troubles` are sentences on what could not be seen or done;
    `leases` are those that were read."""

    plan: Plan
    dry_run: bool
    zones: tuple[str, ...]
    time: float
    outcomes: tuple[Outcome, ...] = ()
    forgotten: tuple[Forgotten, ...] = ()
    troubles: list[str] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)


class Reaper:
    """One pass over a project; `run` returns what was found and done."""

    def __init__(
        self,
        scope: Scope,
        cloud: TpuCloud,
        book: LeaseBook,
        clock: Clock,
        report: Callable[[str], None],
        *,
        ttl_s: float = LEASE_TTL_S,
        delete_s: float = DELETE_S,
    ) -> None:
        self._scope = scope
        self._cloud = cloud
        self._book = book
        self._clock = clock
        self._report = report
        self._ttl_s = ttl_s
        self._delete_s = delete_s
        self._troubles: dict[str, None] = {}
        self._damaged: dict[str, str] = {}
        self._pools: dict[str, PoolSettings] = {}
        self._drivers = Drivers(scope.bucket, ttl_s, self._trouble)

    async def run(self, *, dry_run: bool = False) -> Reaped:
        """Look, watch, decide, and unless it is a dry run, delete.

        Raises:
            CloudError: the cloud answers for no zone.
            tpu.checkpoint.retry.StorageUnavailable: the bucket does not answer: nothing is known to be unused then.
        """
        await self._find_pools()
        seen, zones = await self._list_cloud()
        facts = await self._watch(seen)
        made = plan(seen, facts, zones, self._scope.pool)
        if any(one.dead for one in made.deletions):
            seen = await self._look_again(seen, {one.sighting.name for one in made.deletions if one.dead})
            made = plan(seen, facts, zones, self._scope.pool)
        done = Reaped(made, dry_run, tuple(sorted(zones)), facts.now, leases=dict(facts.leases))
        if not dry_run:
            await self._each(self._note_ready, made.arrived)
            done.outcomes = await self._each(self._delete, made.deletions)
            forgotten = await self._each(self._forget, made.forgotten)
            done.forgotten = tuple(one for one in forgotten if one is not None)
        done.troubles = list(self._troubles)
        return done

    def _trouble(self, text: str) -> None:
        if text not in self._troubles:
            self._report(text)
        self._troubles[text] = None

    # --- looking ---

    async def _find_pools(self) -> None:
        names = await asyncio.to_thread(objects.folders, f"{self._scope.bucket}/pools")
        if self._scope.pool not in (None, *names):
            known = ", ".join(names) or "none yet"
            self._trouble(f"there is no pool {self._scope.pool} in {self._scope.bucket}; there are: {known}")
        for name in names:
            if self._scope.pool in (None, name):
                try:
                    self._pools[name] = await self._book.settings(name)
                except PoolSettingsError as error:
                    # Its free slices are kept: how long they are to be is not known.
                    self._trouble(f"settings of the pool {name}: {error}")
                    self._pools[name] = PoolSettings(idle_minutes=1e9)

    async def _list_cloud(self) -> tuple[list[Sighting], set[str]]:
        """All slices that the cloud shows, and the zones that it has answered for."""
        known = await self._known_zones()
        try:
            nodes, queued = await self._list_zone(EVERY_ZONE)
        except CloudError as error:
            if not known:
                raise CloudError(
                    error.kind, error.code, f"{error.message}; name the zones to ask", wanted=error.wanted
                ) from error
            self._trouble(
                f"the cloud does not answer for all zones at once, they are asked one by one: {error}"
            )
            return await self._list_zones(known)
        zones = known | {one.zone for one in nodes} | {one.zone for one in queued}
        return sightings(nodes, queued), zones

    async def _list_zones(self, known: Collection[str]) -> tuple[list[Sighting], set[str]]:
        names = sorted(known)
        answers = await asyncio.gather(*map(self._list_zone, names), return_exceptions=True)
        seen: list[Sighting] = []
        zones: set[str] = set()
        last: CloudError | None = None
        for zone, answer in zip(names, answers, strict=True):
            if isinstance(answer, CloudError):
                last = answer
                self._trouble(f"{zone} could not be seen, and nothing in it is touched: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                zones.add(zone)
                seen += sightings(*answer)
        if not zones and last is not None:
            raise last
        return seen, zones

    async def _list_zone(self, zone: str) -> tuple[list[Node], list[QueuedResource]]:
        return await asyncio.gather(self._cloud.list_nodes(zone), self._cloud.list_queued_resources(zone))

    async def _look_again(self, seen: Sequence[Sighting], names: Collection[str]) -> list[Sighting]:
        """The same slices, those of `names` as the cloud shows them now.

        The lists are older than the leases, and the two of a zone are not of one moment: what has just become ready
        may look dead by them.
        """

        async def look(one: Sighting) -> Sighting | None:
            if one.name not in names:
                return one
            try:
                found = await take_look(self._cloud, one.zone, one.name, spot=True, was_ready=True)
            except CloudError as error:
                self._trouble(f"{one.name} may be dead, which could not be confirmed: {error}")
                return None
            known = found.queued_resource is not None or found.node is not None
            return Sighting(one.name, one.zone, found.queued_resource, found.node) if known else None

        return [one for one in await self._each(look, seen) if one is not None]

    async def _known_zones(self) -> set[str]:
        zones = set(self._scope.zones)
        for name, settings in self._pools.items():
            zones |= {candidate.zone for candidate in settings.candidates}
            zones |= {lease.candidate.zone for lease in (await self._leases_of(name)).values()}
        return zones

    async def _leases_of(self, pool: str) -> dict[str, Lease]:
        """A pool's leases of slices that are not gone; of a pool with a damaged one none are known from here."""
        try:
            return {kept.lease.slice: kept.lease for kept in await self._book.list(pool)}
        except MalformedLease as error:
            self._trouble(f"pool {pool}: {error}")
            return {}

    async def _leases(self, seen: Sequence[Sighting]) -> dict[str, Lease]:
        """The leases of all pools, and those of slices that the cloud shows though they are gone by their lease."""
        found: dict[str, Lease] = {}
        for pool in self._pools:
            found |= await self._leases_of(pool)
        by_label = {label_value(name): name for name in self._pools}
        missing = [
            (one.name, by_label[one.labels[POOL_LABEL]])
            for one in seen
            if one.name not in found and is_ours(one.labels) and one.labels[POOL_LABEL] in by_label
        ]

        async def read(name: str, pool: str) -> None:
            try:
                kept = await self._book.read(pool, name)
            except MalformedLease as error:
                self._damaged[name] = f"its lease is damaged ({error})"
                self._trouble(f"the lease of {name} is damaged: {error}")
            else:
                if kept is not None:
                    found[name] = kept.lease

        for start in range(0, len(missing), READERS):
            await asyncio.gather(*(read(*one) for one in missing[start : start + READERS]))
        return found

    # --- watching ---

    async def _watch(self, seen: Sequence[Sighting]) -> Facts:
        """Look at leases and drivers until of each party is known whether it lives: it beats, or is silent for long."""
        observer, drivers = LeaseObserver(self._ttl_s), self._drivers
        first: set[tuple[str, str, int, int]] | None = None
        began = self._clock.monotonic()
        while True:
            found = await self._leases(seen)
            silent = observer.see_all(found.values(), self._clock.monotonic())
            facts = Facts(
                bucket=self._scope.bucket,
                leases=found,
                settings=self._pools,
                silent=silent,
                drivers=await drivers.look(
                    runs_to_watch(seen, self._facts(found), self._scope.pool), self._clock.monotonic()
                ),
                damaged=self._damaged,
                now=self._clock.time(),
            )
            keys = {
                (lease.slice, *beat_of(party)): party for lease in found.values() for party in lease.parties
            }
            first = set(keys) if first is None else first
            quiet = {party for parties in silent.values() for party in parties}
            open_ends = [key for key, party in keys.items() if key in first and party not in quiet]
            # Who cannot be settled in this time (others came and went meanwhile) counts as living.
            late = self._clock.monotonic() - began > 3 * self._ttl_s
            if late or not (open_ends or drivers.undecided):
                return facts
            await self._clock.sleep(min(LONGEST_PAUSE_S, self._ttl_s / LOOKS_A_TTL))

    def _facts(self, found: dict[str, Lease]) -> Facts:
        return Facts(self._scope.bucket, found, self._pools, {}, {}, self._damaged, self._clock.time())

    # --- doing ---

    async def _each(self, do: Callable[[Item], Awaitable[Done]], items: Iterable[Item]) -> tuple[Done, ...]:
        limit = asyncio.Semaphore(DELETIONS_AT_ONCE)

        async def one(item: Item) -> Done:
            async with limit:
                return await do(item)

        return tuple(await asyncio.gather(*(one(item) for item in items)))

    async def _delete(self, deletion: Deletion) -> Outcome:
        one = deletion.sighting
        try:
            await self._close(deletion)
        except (LeaseRefused, _Driven) as error:
            self._report(f"{one.name} is left alone: {error}")
            return Outcome(deletion, spared=str(error))
        except _NO_ANSWER as error:
            self._trouble(f"{one.name}: {error}")
            return Outcome(deletion, trouble=str(error))
        self._report(f"deleting {one.name} in {one.zone}: {deletion.reason}")
        try:
            await delete_slice(self._cloud, one.zone, one.name, self._clock, self._delete_s)
        except (DeletionUnconfirmed, CloudError) as error:
            self._trouble(str(error))
            return Outcome(deletion, trouble=str(error))
        await self._write_down(
            deletion.lease, _users(deletion), one.name, deletion.reason, lost=deletion.dead
        )
        return Outcome(deletion)

    async def _note_ready(self, lease: Lease) -> None:
        """Of a creation that nobody waited for to the end: it is in the pool from now on."""
        now = self._clock.time()
        try:
            await update(self._book, lease.pool, lease.slice, lambda one: leases.ready(one, now))
        except LeaseRefused:
            return  # somebody has closed it meanwhile
        except _NO_ANSWER as error:
            self._trouble(f"{lease.slice}: {error}")

    async def _close(self, deletion: Deletion) -> None:
        """From here on nobody can take it: whoever comes first, a taker or we, the other one is refused."""
        now, lease = self._clock.time(), deletion.lease
        if lease is None:
            run = deletion.sighting.labels.get(RUN_LABEL)
            if run is not None and await self._drivers.moved(run):
                raise _Driven(f"its run {run} is driven again")
            return

        def closed(found: Lease) -> Lease:
            if found.state is LeaseState.GONE:
                return found
            for party in deletion.drop:
                found = leases.drop(found, party, now)
            return leases.retire(found, deletion.reason)

        await update(self._book, lease.pool, lease.slice, closed)

    async def _forget(self, one: Forgotten) -> Forgotten | None:
        """Mark a lease gone, once the cloud confirms that there is no such slice."""
        lease = one.lease
        try:
            look = await take_look(
                self._cloud, lease.candidate.zone, lease.slice, spot=True, was_ready=lease.ready is not None
            )
            if look.queued_resource is not None or look.node is not None:
                return None  # it came after the list: the next pass knows more
            now = self._clock.time()

            def dropped(found: Lease) -> Lease:
                for party in one.drop:
                    found = leases.drop(found, party, now)
                return leases.retire(found, one.reason)

            await update(self._book, lease.pool, lease.slice, dropped)
        except LeaseRefused:
            return None
        except (CloudError, *_NO_ANSWER) as error:
            self._trouble(f"{lease.slice}: {error}")
            return None
        users = [party.run for party in one.drop if isinstance(party, Holder)]
        await self._write_down(lease, users, lease.slice, one.reason, lost=True)
        self._report(f"the lease of {lease.slice} is closed: {one.reason}")
        return one

    async def _write_down(
        self, lease: Lease | None, runs: Collection[str], name: str, why: str, *, lost: bool
    ) -> None:
        """It is gone: in its lease, and in the history of the runs that have paid for it until now."""
        now = self._clock.time()
        try:
            if lease is not None:
                await update(
                    self._book, lease.pool, lease.slice, lambda one: leases.gone(one, why, now, lost=lost)
                )
            for run in runs:
                await asyncio.to_thread(
                    note_from_outside, run_directory(self._scope.bucket, run), name, now, "slice-deleted",
                    slice=name, why=f"by the reaper: {why}",
                )  # fmt: skip
        except (LeaseRefused, *_NO_ANSWER) as error:
            self._trouble(f"{name} is gone, but this could not be written down: {error}")


class _Driven(Exception):
    """A run is driven again."""


def _users(deletion: Deletion) -> list[str]:
    """Runs whose ledger has the slice still."""
    if deletion.lease is not None:
        return [holder.run for holder in deletion.lease.holders]
    run = deletion.sighting.labels.get(RUN_LABEL)
    return [run] if run is not None else []
