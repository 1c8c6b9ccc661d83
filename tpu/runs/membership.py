"""A run's place in its pool: the leases that it holds, the beat that keeps them, and what it hears by them.

A lease that is lost is like a slice that is lost: the run leaves it alone. Another run's due claim on its chips says
that this one is to leave at its next commit, or when that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.hosts.gang import Tenant
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.lease import LEASE_BEAT_S, Claim, Holder, Lease, LeaseObserver, LeaseRefused, LeaseState
from tpu.slices.lease_book import Kept, LeaseBook, LeaseContended, update
from tpu.slices.pool import Decision, Evict, Part, Take, Wait, Wanted, assign, evictor
from tpu.slices.pool_settings import PoolSettings, in_minutes
from tpu.slices.pool_size import keeps, too_many
from tpu.topology import accelerator_type


class Withdrawn(Exception):
    """A slice that was about to be asked for is not wanted any more; the message says why."""


@dataclass(frozen=True)
class Held:
    """What a run holds of a slice. `chips` are numbered through all of its hosts."""

    slice: str
    candidate: Candidate
    chips: tuple[int, ...]
    term: int

    @property
    def tenant(self) -> Tenant:
        """By which lease it has which chips of each of its hosts; of several hosts it has all."""
        here = accelerator_type(self.candidate.accelerator_type).chips_per_host
        return Tenant(self.term, tuple(sorted({chip % here for chip in self.chips})))


class Membership:
    """`wanted` says what the run waits for; leases are held under its uid, whichever process drives the run."""

    def __init__(
        self, book: LeaseBook, pool: str, wanted: Wanted, clock: Clock, report: Callable[[str], None]
    ) -> None:
        self.held: dict[str, Held] = {}
        self.lost: dict[str, str] = {}  # slices whose lease was lost, and how
        self.evicted: dict[str, Claim] = {}  # slices that are to be left at the next commit
        self.avoided: set[str] = set()  # slices that are not to be taken: the run has failed there
        self.settings = PoolSettings()
        self._book = book
        self._pool = pool
        self._wanted = wanted
        self._clock = clock
        self._report = report
        self._observer = LeaseObserver()
        self._claimed: dict[str, tuple[Part, bool, float]] = {}  # with what was claimed, and when
        self._task: asyncio.Task[None] | None = None

    def set_priority(self, priority: int) -> None:
        """From the next look and beat on it is another one, also of what is held."""
        self._wanted = replace(self._wanted, priority=priority)

    def start(self) -> None:
        """Renew what is held from now on."""
        self._task = asyncio.create_task(self._beat())

    async def leave(self) -> None:
        """Renew nothing any more, and give claims back. What is held is held until it expires."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # what it had to say was said
                await self._task
        with contextlib.suppress(StorageUnavailable, LeaseContended):
            await self._unclaim(set(self._claimed))

    # --- waiting for a place ---

    async def decide(self, can_create: tuple[Candidate, ...]) -> Decision:
        """Look at the pool and say what to do now; claims are made and given back here.

        `can_create` are the candidates whose zones serve now. One that does not is asked all the same if nobody of
        lower priority can be evicted instead.
        """
        self.settings = await self._book.settings(self._pool)
        found = await self._leases()
        # What a driver of this run held that died before it had noted it.
        left = [one.slice for one in found if one.holder(self._wanted.uid) and one.slice not in self.held]
        for name in left:
            await self.release(name)
        if left:
            found = await self._leases()
        decision = self._assign(found, self.settings, can_create)
        reserve = () if isinstance(decision, Take) else decision.reserve
        due = decision.parts if isinstance(decision, Evict) else ()
        taken = decision.parts if isinstance(decision, Take) else ()
        await self._unclaim(self._claimed.keys() - {part.slice for part in (*reserve, *due, *taken)})
        for part in due:
            await self._claim(part, due=True)
        for part in reserve:
            if part not in due:
                await self._claim(part, due=False)
        return decision

    async def better_than_making(self, can_create: tuple[Candidate, ...]) -> bool:
        """Whether something can be taken, or be had by evicting, while a slice is being made. Changes nothing."""
        # The one that is being made has its place in the pool already.
        free = PoolSettings(evict_minutes=self.settings.evict_minutes)
        found = [lease for lease in await self._leases() if lease.state is LeaseState.READY]
        return isinstance(self._assign(found, free, can_create), Take | Evict)

    async def _leases(self) -> list[Lease]:
        return [one.lease for one in await self._book.list(self._pool)]

    def _assign(
        self, found: list[Lease], settings: PoolSettings, can_create: tuple[Candidate, ...]
    ) -> Decision:
        silent = self._observer.see_all(found, self._clock.monotonic())
        # What it holds already counts, and is nothing to be taken.
        others = [
            replace(lease, state=LeaseState.QUARANTINED)
            if lease.holder(self._wanted.uid) or lease.slice in self.avoided
            else lease
            for lease in found
        ]
        wanted = replace(self._wanted, can_create=can_create)
        decision = assign([wanted], others, settings, silent)[wanted.uid]
        if isinstance(decision, Wait) and can_create != self._wanted.candidates:
            decision = assign([self._wanted], others, settings, silent)[wanted.uid]
        return decision

    async def take(self, part: Part) -> Lease:
        """Take chips of a slice, from those who were silent for too long, too.

        Raises:
            LeaseRefused: somebody else was quicker.
        """
        now = self._clock.time()

        def change(lease: Lease) -> Lease:
            return leases.take(_dropped(lease, part, now), self._holder(part.chips), now)

        kept = await update(self._book, self._pool, part.slice, change)
        self._claimed.pop(part.slice, None)
        self._keep(kept.lease)
        return kept.lease

    async def _claim(self, part: Part, due: bool) -> None:
        before, monotonic = self._claimed.get(part.slice), self._clock.monotonic()
        if before is not None and before[:2] == (part, due) and monotonic - before[2] < LEASE_BEAT_S / 2:
            return
        me, now = self._wanted, self._clock.time()
        claim = Claim(me.run, me.uid, me.priority, part.chips, due)
        try:
            await update(
                self._book,
                self._pool,
                part.slice,
                lambda lease: leases.claim(_dropped(lease, part, now), claim, now),
            )
        except LeaseRefused:
            return  # somebody was quicker: the next decision sees that
        self._claimed[part.slice] = (part, due, monotonic)

    async def _unclaim(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(LeaseRefused):
                await update(
                    self._book, self._pool, name, lambda lease: leases.unclaim(lease, self._wanted.uid)
                )
            self._claimed.pop(name, None)

    # --- making a slice ---

    def chips_of_new(self, candidate: Candidate) -> tuple[int, ...]:
        """What of a slice that is made for the run it will hold."""
        chips = self._wanted.chips
        return tuple(range(accelerator_type(candidate.accelerator_type).chips if chips is None else chips))

    async def intend(self, name: str, candidate: Candidate) -> None:
        """Write down that a slice is about to be asked for.

        Raises:
            Withdrawn: it is not to be asked for after all. The pool is full, or another slice that was intended
                before has room for this run.
        """
        lease = self._intent(name, candidate)
        created = await self._book.create(lease)
        kept = await self._book.change(leases.admit(lease, created.generation), created.generation)
        self._keep(kept.lease)
        self.settings = await self._book.settings(self._pool)
        if (why := await self._not_to_be_made(kept)) is not None:
            await self.gone(name, why)
            raise Withdrawn(why)

    def _intent(self, name: str, candidate: Candidate) -> Lease:
        return leases.intend(
            name, self._pool, candidate, accelerator_type(candidate.accelerator_type).chips, self._wanted.uid,
            self._clock.time(), self._holder(self.chips_of_new(candidate)), self._wanted.flavour,
        )  # fmt: skip

    async def _not_to_be_made(self, own: Kept) -> str | None:
        if self.settings.max_slices is None and self._wanted.chips is None:
            return None
        kept = await self._book.list(self._pool)
        places = [(one.lease, one.generation) for one in kept]
        if (why := too_many(places, own.lease, self.settings)) is not None or self._wanted.chips is None:
            return why
        order = own.lease.order or 0
        before = [one.lease for one in kept if (one.lease.order or one.generation) < order]
        decision = assign([self._wanted], before, PoolSettings(max_slices=0))[self._wanted.uid]
        return f"{decision.parts[0].slice} has room for it" if isinstance(decision, Take) else None

    async def ready(self, name: str) -> None:
        """The slice is ready: others may take what is free of it."""
        now = self._clock.time()
        with contextlib.suppress(LeaseRefused):  # lost, or quarantined meanwhile: the beat and the cloud tell
            await update(self._book, self._pool, name, lambda lease: leases.ready(lease, now))

    # --- parting with one ---

    async def take_up(self, name: str, candidate: Candidate) -> bool:
        """Whether the run still holds a slice that an earlier driver had."""
        kept = await self._book.read(self._pool, name)
        if kept is None:  # it was asked for before there were leases, or the driver died between the two
            kept = await self._book.create(self._intent(name, candidate))
        elif kept.lease.holder(self._wanted.uid) is None:
            self.lost[name] = _who_has(kept.lease)
            return False
        self._keep(kept.lease)
        with contextlib.suppress(StorageUnavailable, LeaseContended):
            await self.renew(name)
        return name in self.held

    async def release(self, name: str) -> None:
        """Give back what is held of a slice, whatever becomes of it."""
        now, uid = self._clock.time(), self._wanted.uid
        with contextlib.suppress(LeaseRefused):
            await update(self._book, self._pool, name, lambda lease: leases.release(lease, uid, now))
        self._forget(name)

    async def part_with(self, name: str, *, clean: bool, why: str, keep: bool = False) -> bool:
        """Give a slice back if it may go on without this run, and return True; False if it is to be deleted now.

        A clean slice goes on if others hold chips of it or want it, or if the pool keeps idle ones, or if `keep` says
        that somebody takes it next. One that is not is taken by nobody any more, and who leaves it last deletes it.
        """
        kept = await self._book.list(self._pool)
        settings = await self._book.settings(self._pool)
        stays = clean and (keep or keeps((one.lease for one in kept), settings))
        now, uid = self._clock.time(), self._wanted.uid

        def change(lease: Lease) -> Lease:
            if lease.state is LeaseState.GONE or lease.holder(uid) is None:
                return lease
            if not clean:
                lease = leases.quarantine(lease, f"{self._wanted.run}: {why}")
            wanted = lease.claim is not None and lease.claim.uid != uid
            if lease.held_by_others(uid) or (lease.open and (stays or wanted)):
                return leases.release(lease, uid, now)
            return leases.retire(lease, "its last run has ended", uid)

        try:
            after = (await update(self._book, self._pool, name, change)).lease
        except LeaseRefused:
            return False  # there is no lease of it: nobody else can have it
        if after.state is LeaseState.GONE or (not after.open and not after.held_by_others(uid)):
            return False
        self._forget(name)
        return True

    async def read(self, name: str) -> Lease | None:
        kept = await self._book.read(self._pool, name)
        return kept.lease if kept is not None else None

    async def quarantine(self, name: str, why: str) -> None:
        """Nobody may take it any more."""
        with contextlib.suppress(LeaseRefused):
            await update(self._book, self._pool, name, lambda lease: leases.quarantine(lease, why))

    async def gone(self, name: str, why: str) -> None:
        """The cloud says that the slice is no more, or it was never made."""
        now = self._clock.time()
        with contextlib.suppress(LeaseRefused):  # there is no lease of it
            await update(self._book, self._pool, name, lambda lease: leases.gone(lease, why, now, lost=True))
        self._forget(name)

    async def close(self, name: str, why: str) -> None:
        """The cloud has taken it, and it is to be deleted: nobody holds anything of it any more."""
        now = self._clock.time()
        with contextlib.suppress(LeaseRefused):
            await update(self._book, self._pool, name, lambda lease: leases.close(lease, why, now))
        self._forget(name)

    # --- the beat ---

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(LEASE_BEAT_S)
            for name in list(self.held):
                if name not in self.held:  # given back while another one was renewed
                    continue
                try:
                    await self.renew(name)
                except Exception as error:  # whatever it is: a beat that ends is taken for the run's death
                    self._report(f"the lease of {name} is not renewed, trying again: {error}")

    async def renew(self, name: str) -> None:
        """Show that the run lives, and hear whether it is to leave."""
        held, now = self.held[name], self._clock.time()

        def change(lease: Lease) -> Lease:
            for silent in self._observer.see(lease, self._clock.monotonic()):
                if silent.uid != self._wanted.uid:  # nobody waits for a run that has died, nor leaves for it
                    lease = leases.drop(lease, silent, now)
            return leases.renew(lease, self._wanted.uid, held.term, now, self._wanted.priority)

        try:
            lease = (await update(self._book, self._pool, name, change)).lease
        except LeaseRefused as error:
            if name in self.held:  # not given back meanwhile
                self._forget(name)
                self.lost[name] = str(error)
            return
        claim = evictor(lease, self._wanted.uid)
        if claim is None:
            self.evicted.pop(name, None)
        elif name not in self.evicted:
            self.settings = await self._book.settings(self._pool)
            self.evicted[name] = claim
            latest = in_minutes(self.settings.evict_minutes)
            who = f"{claim.run} (priority {claim.priority})"
            self._report(f"{who} wants {name}: leaving at the next commit, or {latest}")

    def _holder(self, chips: tuple[int, ...]) -> Holder:
        return Holder(self._wanted.run, self._wanted.uid, chips, self._wanted.priority)

    def _keep(self, lease: Lease) -> None:
        holder = lease.holder(self._wanted.uid)
        assert holder is not None
        self.lost.pop(lease.slice, None)
        self.held[lease.slice] = Held(lease.slice, lease.candidate, holder.chips, holder.term)

    def _forget(self, name: str) -> None:
        self.held.pop(name, None)
        self.evicted.pop(name, None)


def _dropped(lease: Lease, part: Part, now: float) -> Lease:
    """Without those that were seen silent for too long; who has beaten meanwhile stays."""
    for silent in part.drop:
        with contextlib.suppress(LeaseRefused):
            lease = leases.drop(lease, silent, now)
    return lease


def _who_has(lease: Lease) -> str:
    told = ", ".join(holder.run for holder in lease.holders)
    return f"the lease of {lease.slice} expired" + (f" and was given to {told}" if told else "")
