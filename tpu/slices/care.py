"""Carry slices through their lives: what the table of tpu.slices.life says is to be done, is done here.

No slice has a task that waits for it: there is work for it, or there is none. Work that fails because the cloud or
the bucket does not answer stays to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError, ErrorKind, Failure, QueuedResourceRequest, TpuCloud
from tpu.cloud.errors import quota_name
from tpu.slices import lease as leases
from tpu.slices import life
from tpu.slices.acquire import Answer, answer_to
from tpu.slices.candidate import Candidate
from tpu.slices.condition import look_of, take_look
from tpu.slices.deletion import send_deletion
from tpu.slices.intent import node_request
from tpu.slices.lease import Lease, LeaseRefused, LeaseState, MalformedLease
from tpu.slices.lease_book import Kept, LeaseBook, LeaseContended, update
from tpu.slices.life import Effect, LifeState, Signal
from tpu.slices.monitor import Monitor, Watch
from tpu.slices.project_memory import ProjectMemory, Result, remembered
from tpu.slices.request import SliceRequest
from tpu.slices.zone_health import EARLY_DEATH_S

# Work that goes on at one time; more would only queue up at the API and in the bucket.
AT_ONCE = 32
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
# A candidate whose quota is used up is asked again after so long; one that was refused for good, never.
QUOTA_PAUSE_S = 60.0
# How long the call that creates a plain node may take; it is looked for afterwards.
_PLAIN_NODE_S = 30.0

_FULL = frozenset({ErrorKind.STOCKOUT, ErrorKind.RESERVATION_FULL})


@dataclass(slots=True)
class Cared:
    """A slice that is cared for. Times are monotonic, but for `ready_at`: seconds since the epoch."""

    lease: Lease
    generation: int
    state: LifeState
    began: float
    since: float
    watch: Watch | None = None
    to_do: list[Effect] = field(default_factory=list)
    busy: bool = False
    tries: int = 0
    retry_at: float = 0.0
    sent: bool = False  # whether a creation may have reached the cloud
    ready_at: float | None = None
    why: str = ""


class Care:
    """Of the slices of one pool, by name. Signals come in by `hear`; work is done by tasks of `group`."""

    def __init__(
        self,
        pool: str,
        request: SliceRequest,
        cloud: TpuCloud,
        book: LeaseBook,
        memory: ProjectMemory,
        monitor: Monitor,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        """`request` is what every slice is like, apart from its candidate."""
        self.slices: dict[str, Cared] = {}
        # Candidates that are not to be asked before a moment (monotonic), and why.
        self.shut: dict[Candidate, tuple[float, str]] = {}
        self.group: asyncio.TaskGroup | None = None
        self._pool = pool
        self._request = request
        self._cloud = cloud
        self._book = book
        self._memory = memory
        self._monitor = monitor
        self._clock = clock
        self._report = report
        self._limit = asyncio.Semaphore(AT_ONCE)

    def add(self, kept: Kept, state: LifeState) -> Cared:
        """Care for a slice from now on, from this state of its life."""
        now = self._clock.monotonic()
        one = Cared(kept.lease, kept.generation, state, began=now, since=now)
        self.slices[kept.lease.slice] = one
        return one

    def watch(self, one: Cared) -> None:
        """Hear from now on what the cloud says of it."""
        if one.watch is not None:
            one.watch.close()
        one.watch = self._monitor.watch(
            one.lease.candidate.zone,
            one.lease.slice,
            spot=self._request.of(one.lease.candidate).spot,
            was_ready=one.lease.ready is not None,
            on_change=self._seen,
        )

    def _seen(self, watch: Watch) -> None:
        one = self.slices.get(watch.name)
        if one is not None and one.watch is watch:
            self.hear(one, life.signal_of(watch.view), watch.view.reason)

    def hear(self, one: Cared, signal: Signal, why: str = "") -> None:
        """Take in what has happened to a slice, and begin what follows."""
        before = one.state
        one.state, effects = life.step(before, signal)
        if why and life.alive(before):
            one.why = why
        if one.state is not before:
            one.since = self._clock.monotonic()
            if life.alive(before) and not life.alive(one.state):
                self._report(f"{one.lease.slice} ({one.lease.candidate}) is {one.state.value}: {one.why}")
        one.to_do.extend(effect for effect in effects if effect not in one.to_do)
        if one.to_do:
            one.tries = 0
            self.work(one)

    def work(self, one: Cared) -> None:
        """Begin what is to be done, if nobody is at it and it is not too soon after a failure."""
        due = one.tries == 0 or self._clock.monotonic() >= one.retry_at
        if not one.busy and due:
            one.busy = True
            self.spawn(self._carry_out(one))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self.group is not None  # signals come while `run` runs
        self.group.create_task(work)

    async def _carry_out(self, one: Cared) -> None:
        """Do what is to be done, in order; what cannot be done now is tried again later."""
        try:
            while one.to_do:
                if one.to_do[0] is Effect.CREATE:
                    await self._clock.sleep(await self._remembered(self._memory.reserve_creation(), 0.0))
                async with self._limit:
                    await self._do(one, one.to_do[0])
                one.to_do.pop(0)
                one.tries = 0
        except (CloudError, StorageUnavailable, LeaseContended, LeaseRefused, MalformedLease) as error:
            one.tries += 1
            pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(one.tries - 1, 16))
            one.retry_at = self._clock.monotonic() + pause_s
            self._report(f"{one.lease.slice}: {error}; trying again in {pause_s:.0f} s")
        finally:
            one.busy = False
        if one.state is LifeState.GONE and not one.to_do:
            self._forget(one)

    async def _remembered(self, asked: Awaitable[Result], otherwise: Result) -> Result:
        return await remembered(asked, otherwise, self._report)

    async def _do(self, one: Cared, effect: Effect) -> None:
        now = self._clock.time()
        match effect:
            case Effect.CREATE:
                await self._create(one)
            case Effect.LOOK:
                assert one.watch is not None
                await one.watch.look_now()
            case Effect.NOTE_READY:
                await self._note_ready(one)
            case Effect.NOTE_LOSS:
                await self._note_loss(one)
            case Effect.BAR:
                await self.change(one, lambda lease: leases.quarantine(lease, one.why))
            case Effect.CLOSE_IF_FREE:
                try:
                    await self.change(one, lambda lease: leases.retire(lease, one.why))
                except LeaseRefused:
                    self.hear(one, Signal.LEASE_HELD)
                else:
                    self.hear(one, Signal.LEASE_CLOSED)
            case Effect.CLOSE:
                await self.change(one, lambda lease: leases.close(lease, one.why, now))
                self.hear(one, Signal.LEASE_CLOSED)
            case Effect.DELETE:
                await self._delete(one)
            case Effect.NOTE_GONE:
                await self.change(one, lambda lease: leases.gone(lease, one.why, now))

    async def change(self, one: Cared, change: Callable[[Lease], Lease]) -> None:
        """Change its lease, unless somebody else has written down already that the slice is gone."""
        kept = await update(
            self._book,
            self._pool,
            one.lease.slice,
            lambda lease: lease if lease.state is LeaseState.GONE else change(lease),
        )
        one.lease, one.generation = kept.lease, kept.generation

    async def _create(self, one: Cared) -> None:
        if one.state is not LifeState.INTENDED:
            return  # it was given up while it waited for its turn
        candidate, name = one.lease.candidate, one.lease.slice
        asked, one.sent = self._clock.time(), True
        try:
            await self._ask(candidate, name)
        except CloudError as error:
            await self._note_refusal(candidate, error.kind, error, asked)
            self.hear(one, Signal.CREATION_REFUSED, str(error))
        else:
            self.hear(one, Signal.CREATION_ACCEPTED)
            self.watch(one)  # only now: a look that began before would find nothing

    async def _ask(self, candidate: Candidate, name: str) -> None:
        node = node_request(name, self._request.of(candidate))
        try:
            await self._cloud.create_queued_resource(candidate.zone, name, QueuedResourceRequest(node))
        except CloudError as error:
            if error.kind is not ErrorKind.NO_QUEUE:
                raise
            try:
                await self._cloud.create_node(candidate.zone, name, node, _PLAIN_NODE_S)
            except CloudError as refused:
                if refused.kind is not ErrorKind.TIMED_OUT:  # else it is being made
                    raise

    async def _note_refusal(
        self, candidate: Candidate, kind: ErrorKind, error: CloudError | Failure, asked: float
    ) -> None:
        """What a refusal says of the place goes into the project's memory; what it says of us is kept here."""
        if kind in _FULL:
            await self._remembered(self._memory.note(candidate, "stockout", asked), None)
        match answer_to(kind):
            case Answer.DROP if kind is ErrorKind.NO_QUOTA:
                quota = quota_name(error.message) or error.message
                await self._remembered(self._memory.note_no_quota(candidate, quota), None)
            case Answer.DROP:
                self.shut[candidate] = (math.inf, error.message)
                self._report(f"{candidate} is not asked for any more: {error.message}")
            case Answer.SLOWER:
                await self._remembered(self._memory.creation_refused(), None)
            case Answer.FREE_QUOTA:  # our dead slices are being deleted, as every dead one is
                self.shut[candidate] = (self._clock.monotonic() + QUOTA_PAUSE_S, error.message)
            case Answer.AGAIN:
                await self._remembered(self._memory.note(candidate, "early death", asked), None)
            case Answer.LATER:
                pass

    async def _note_ready(self, one: Cared) -> None:
        now = self._clock.time()
        with contextlib.suppress(LeaseRefused):  # quarantined meanwhile; the next pass finds that
            await self.change(one, lambda lease: leases.ready(lease, now))
        if one.ready_at is None:
            one.ready_at = now
            await self._remembered(self._memory.note(one.lease.candidate, "success", one.lease.created), None)

    async def _note_loss(self, one: Cared) -> None:
        watch, candidate = one.watch, one.lease.candidate
        if watch is None:
            return
        queued = watch.answer[0] if watch.answer else None
        if queued is not None and queued.failure is not None:
            await self._note_refusal(candidate, queued.failure.kind, queued.failure, one.lease.created)
        elif watch.view.preempted and not watch.view.gone:  # what is gone was deleted, most likely by a run
            now = self._clock.time()
            ready = now if one.ready_at is None else one.ready_at
            if now - ready <= EARLY_DEATH_S:
                await self._remembered(self._memory.note(candidate, "early death", one.lease.created), None)

    async def _delete(self, one: Cared) -> None:
        """Ask for the deletion of what there is. Of what is not there this is the confirmation."""
        if not one.sent:
            self.hear(one, Signal.SEEN_GONE)
            return
        zone, name = one.lease.candidate.zone, one.lease.slice
        answer = one.watch.answer if one.watch is not None else None
        if answer is not None and any(answer):
            look = look_of(*answer, spot=True, was_ready=True)
        else:
            look = await take_look(self._cloud, zone, name, spot=True, was_ready=True)
        if look.queued_resource is None and look.node is None:
            self.hear(one, Signal.SEEN_GONE)
            return
        await send_deletion(self._cloud, zone, name, look)
        if one.watch is None:
            self.watch(one)

    def _forget(self, one: Cared) -> None:
        if one.watch is not None:
            one.watch.close()
        self.slices.pop(one.lease.slice, None)
        self._report(f"{one.lease.slice} is gone: {one.why}")
