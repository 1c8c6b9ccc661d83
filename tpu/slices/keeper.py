"""Keeps a pool at its size: asks for slices, follows each through its life, and is rid of it in the end.

Everything that a keeper knows stands in the pool's leases and in the cloud, so it may be killed at any moment: the
next one takes up what it finds. It drives the slices that it has made itself; what runs have made is theirs, and
counts. What is to be done with a slice says the table of tpu.slices.life; what the cloud says of all of them comes
from one monitor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock, sleep_unless
from tpu.cloud import TpuCloud
from tpu.slices import lease as leases
from tpu.slices import life
from tpu.slices.candidate import Candidate
from tpu.slices.care import Care, Cared
from tpu.slices.deletion import SEND_AGAIN_S
from tpu.slices.lease import Lease, LeaseObserver, LeaseRefused, LeaseState, MalformedLease
from tpu.slices.lease_book import Kept, LeaseBook, LeaseContended, update
from tpu.slices.life import Effect, LifeState, Signal
from tpu.slices.life_limit import life_s
from tpu.slices.monitor import Monitor
from tpu.slices.names import slice_name
from tpu.slices.pool_settings import PoolSettings, PoolSettingsError
from tpu.slices.pool_size import Option, at_least, lacking, not_needed, too_many, with_room
from tpu.slices.project_memory import ProjectMemory, remembered
from tpu.slices.request import SliceRequest
from tpu.slices.zone_health import Closed, Fine
from tpu.topology import accelerator_type

# Between two looks at the leases. Shorter than what an observer of holders takes for looking away.
EVERY_S = 10.0
# An intent of a keeper that may still be at work is left alone for so long: its creation may be on its way.
CREATION_S = 180.0
# A slice of limited life serves nobody new for so long before its end.
ENDS_SOON_S = 600.0
# How long a slice that comes back by itself (maintenance, repair) is waited for.
REPAIR_S = 3600.0
# Intents that wait for their turn to be created; more would be overdue before it comes.
INTENTS_AT_ONCE = 32


class Keeper:
    """Keeps the pool `pool`; at most one at a time should, but two do no harm."""

    def __init__(
        self,
        *,
        pool: str,
        options: Sequence[Option],
        request: SliceRequest,
        cloud: TpuCloud,
        book: LeaseBook,
        memory: ProjectMemory,
        monitor: Monitor,
        clock: Clock,
        uid: str,
        report: Callable[[str], None],
        creator: str = "keeper",
        flavour: str = "",
        every_s: float = EVERY_S,
        repair_s: float = REPAIR_S,
    ) -> None:
        """`request` is what every slice is like, apart from its candidate; its labels name pool and creator.

        `uid` is this keeper's own and never comes again: names of slices are made of it. `creator` stands for all
        keepers of the pool, of which the next takes up what the last has left. `flavour` is that of its leases.
        """
        self._pool = pool
        self._options = options
        self._request = request
        self._care = Care(pool, request, cloud, book, memory, monitor, clock, report)
        self._book = book
        self._memory = memory
        self._monitor = monitor
        self._clock = clock
        self._uid = uid
        self._report = report
        self._creator = creator
        self._flavour = flavour
        self._every_s = every_s
        self._repair_s = repair_s
        self._wanted = 0
        self._number = 0
        self._observer = LeaseObserver()
        self._strange: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        self.reasons: dict[Candidate, str] = {}

    def want(self, count: int) -> None:
        """Keep at least so many slices from now on, within the pool's settings."""
        if count != self._wanted:
            self._wanted = count
            self._wake.set()

    def counts(self) -> dict[LifeState, int]:
        """How many of its slices are in each state."""
        found = dict.fromkeys(LifeState, 0)
        for one in self._care.slices.values():
            found[one.state] += 1
        return found

    def hear(self, slice: str, signal: Signal, why: str) -> None:
        """What somebody else knows of a slice: a run that has heard a preemption notice, say. Others are ignored."""
        if (one := self._care.slices.get(slice)) is not None:
            self._care.hear(one, signal, why)

    async def run(self) -> None:
        """Keep the pool until this is cancelled; what is on its way then is taken up by the next keeper."""
        async with asyncio.TaskGroup() as group:
            self._care.group = group
            for option in self._options:
                self._monitor.keep_listing(option.candidate.zone)
            while True:
                self._wake.clear()
                try:
                    await self._pass()
                except (StorageUnavailable, LeaseContended, MalformedLease, PoolSettingsError) as error:
                    self._report(f"pool {self._pool}: {error}")
                self._monitor.check()
                await sleep_unless(self._clock, self._every_s, self._wake)

    async def _pass(self) -> None:
        """Look at the leases and the clock once, and begin what follows."""
        kept = await self._book.list(self._pool)
        settings = await self._book.settings(self._pool)
        listed = {one.lease.slice: one for one in kept}
        for name, one in listed.items():
            known = self._care.slices.get(name)
            if known is not None:
                self._lease_seen(known, one)
            elif one.lease.creator == self._creator:
                self._take_up(one)
        for one in list(self._care.slices.values()):
            self._check_time(one)
            if one.to_do:
                self._care.work(one)
        await self._look_for_strays(listed)
        await self._keep_size(kept, settings)

    # --- what is found ---

    def _take_up(self, kept: Kept) -> None:
        """A slice of an earlier keeper. What it has become says the cloud."""
        lease = kept.lease
        if lease.state is LeaseState.INTENDED and self._clock.time() - lease.created < CREATION_S:
            return
        states = {LeaseState.INTENDED: LifeState.INTENDED, LeaseState.READY: LifeState.UNSURE_READY}
        one = self._care.add(kept, states.get(lease.state, LifeState.RETIRING))
        one.ready_at, one.sent = lease.ready, True
        self._care.watch(one)
        if one.state is LifeState.RETIRING:
            self._care.hear(one, Signal.UNWANTED, lease.why)

    def _lease_seen(self, one: Cared, kept: Kept) -> None:
        one.lease, one.generation = kept.lease, kept.generation
        if kept.lease.state is LeaseState.QUARANTINED and life.alive(one.state):
            self._care.hear(one, Signal.HOST_SICK, kept.lease.why)
        elif one.state is LifeState.RETIRING:
            if not kept.lease.holders:
                self._observer.forget(kept.lease.slice)
                self._care.hear(one, Signal.LEASE_FREED)
            elif silent := self._observer.see(kept.lease, self._clock.monotonic()):
                self._care.spawn(self._drop(one, silent))

    async def _drop(self, one: Cared, silent: Sequence[leases.Holder | leases.Claim]) -> None:
        """End what dead holders hold of a slice that retires."""
        for party in silent:
            try:
                await self._care.change(
                    one, lambda lease, party=party: leases.drop(lease, party, self._clock.time())
                )
            except (LeaseRefused, LeaseContended, StorageUnavailable) as error:
                self._report(f"{one.lease.slice}: {error}")

    def _check_time(self, one: Cared) -> None:
        now = self._clock.monotonic()
        match one.state:
            case LifeState.INTENDED | LifeState.COMING | LifeState.UNSURE:
                if now - one.began >= self._request.deadline_s:
                    self._care.hear(one, Signal.OVERDUE, f"not ready within {self._request.deadline_s:g} s")
            case LifeState.RECOVERING:
                if now - one.since >= self._repair_s:
                    self._care.hear(one, Signal.OVERDUE, f"not ready again within {self._repair_s:g} s")
            case LifeState.DELETING:
                if now - one.since >= SEND_AGAIN_S and not one.to_do:
                    one.since = now
                    self._care.hear(one, Signal.OVERDUE, one.why)
            case LifeState.READY if (left := self._life_left(one)) is not None and left <= ENDS_SOON_S:
                self._care.hear(one, Signal.ENDS_SOON, f"its time is over in {left:.0f} s")
            case _:
                pass

    def _life_left(self, one: Cared) -> float | None:
        """Seconds until the cloud ends the slice, whatever happens; None if it sets no limit."""
        if one.ready_at is None:
            return None
        limit = life_s(one.lease.candidate.provisioning, self._request.max_run_s)
        return None if limit is None else one.ready_at + limit - self._clock.time()

    async def _look_for_strays(self, listed: dict[str, Kept]) -> None:
        """What shows in the cloud under a name whose lease is gone is a creation that arrived late: delete it.

        The lists of the cloud are older than those of the leases, so a name must be strange twice.
        """
        strange: set[tuple[str, str]] = set()
        for zone in {option.candidate.zone for option in self._options}:
            newest = self._monitor.newest(zone)
            if newest is not None:
                names = newest.queued_resources.keys() | newest.nodes.keys()
                strange |= {(zone, name) for name in names - self._care.slices.keys() - listed.keys()}
        for zone, name in strange & self._strange:
            kept = await self._book.read(self._pool, name)
            lease = kept.lease if kept is not None else None
            if kept is None or lease is None or lease.creator != self._creator:
                continue  # not ours: the reaper knows whose
            if lease.state is LeaseState.GONE and lease.candidate.zone == zone:
                one = self._care.add(kept, LifeState.GONE)
                one.sent = True
                self._care.watch(one)
        self._strange = strange

    # --- size ---

    async def _keep_size(self, kept: Sequence[Kept], settings: PoolSettings) -> None:
        existing = [one.lease for one in kept if one.lease.slice not in self._care.slices]
        existing += [one.lease for one in self._care.slices.values() if one.state is not LifeState.GONE]
        useful = [
            lease
            for lease in existing
            if lease.open
            and (lease.slice not in self._care.slices or life.alive(self._care.slices[lease.slice].state))
        ]
        candidates = tuple(option.candidate for option in self._options)
        settings = at_least(settings, self._wanted, candidates)
        for name in not_needed(useful, self._creator, settings, self._clock.time()):
            if (one := self._care.slices.get(name)) is not None and Effect.CLOSE_IF_FREE not in one.to_do:
                self._care.hear(one, Signal.UNWANTED, "nobody needs it")
        count = lacking(useful, len(existing), settings)
        intended = sum(one.state is LifeState.INTENDED for one in self._care.slices.values())
        if (count := min(count, INTENTS_AT_ONCE - intended)) > 0:
            await self._ask_for(count, Counter(lease.candidate for lease in existing), settings)

    async def _ask_for(self, count: int, existing: Counter[Candidate], settings: PoolSettings) -> None:
        """Write so many intents, as far as the zones let us, and carry those out that the pool has room for."""
        written: list[Cared] = []
        shut: set[Candidate] = set()
        places: list[tuple[Lease, int]] = []
        try:
            while len(written) < count and (candidate := await self._next_candidate(existing, shut)):
                written.append(await self._intend(candidate))
                existing[candidate] += 1
            if settings.max_slices is not None:
                places = [(one.lease, one.generation) for one in await self._book.list(self._pool)]
        finally:  # what is written is carried out or withdrawn, also when the bucket does not answer any more
            unsure = settings.max_slices is not None and not places
            crowded = len(places) > (settings.max_slices or 0)
            for one in written:
                why = too_many(places, one.lease, settings) if crowded else None
                if why or unsure:
                    self._care.hear(one, Signal.CREATION_REFUSED, why or "the pool's leases cannot be read")
                else:
                    self._care.hear(one, Signal.INTENT_WRITTEN)

    async def _intend(self, candidate: Candidate) -> Cared:
        """Write down that a slice will be asked for, under a name that no slice ever had."""
        self._number += 1
        name = slice_name(self._pool, self._number, self._uid)
        chips = accelerator_type(candidate.accelerator_type).chips
        now = self._clock.time()
        kept = await self._book.create(
            leases.intend(name, self._pool, candidate, chips, self._creator, now, flavour=self._flavour)
        )
        order = kept.generation
        # Somebody may have taken it already.
        kept = await update(self._book, self._pool, name, lambda lease: leases.admit(lease, order))
        return self._care.add(kept, LifeState.INTENDED)

    async def _next_candidate(self, existing: Counter[Candidate], shut: set[Candidate]) -> Candidate | None:
        """The first candidate that has room and may be asked now; why the others may not is in `reasons`."""
        room = with_room(self._options, existing)
        for option in self._options:
            candidate = option.candidate
            if candidate in shut:
                continue
            until, why = self._care.shut.get(candidate, (0.0, ""))
            if candidate not in room:
                self.reasons[candidate] = f"the pool has its {option.at_most} of them"
            elif self._clock.monotonic() < until:
                self.reasons[candidate] = why
            else:
                answer = await remembered(self._memory.let_through(candidate), Fine(), self._report)
                if isinstance(answer, Fine):
                    self.reasons[candidate] = "asked for"
                    return candidate
                self.reasons[candidate] = (
                    f"the project has none of the quota {answer.quota}"
                    if isinstance(answer, Closed)
                    else answer.why
                )
            shut.add(candidate)
        return None
