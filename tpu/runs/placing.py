"""Get a run a place: what is free in its pool and fits, else a new slice, else that of a run of lower priority.

Whatever is taken over is looked at first: the cloud says that it is well, what earlier tenants left on its chips is
confirmed dead, and a host whose chips somebody else holds is quarantined and costs the run nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from tpu.checkpoint.retry import StorageUnavailable
from tpu.cloud import PREEMPTIBLE, CloudError
from tpu.hosts.connect import HostUnreachable
from tpu.hosts.gang import clear_chips
from tpu.runs import launch
from tpu.runs.clearance import Clearance
from tpu.runs.context import RunContext
from tpu.runs.intents import RunIntents
from tpu.runs.membership import Withdrawn
from tpu.runs.trouble import SliceLost, unless_lost
from tpu.runs.waiting_board import shown_waiting
from tpu.slices.acquire import acquire
from tpu.slices.candidate import Candidate
from tpu.slices.condition import LifeView, slice_condition
from tpu.slices.lease import Lease, LeaseRefused, LeaseState
from tpu.slices.lease_book import LeaseContended
from tpu.slices.pool import Create, Part, Take, Wait
from tpu.slices.project_memory import remembered
from tpu.slices.provision import NoLongerWanted, NotReady, ReadySlice, provision
from tpu.slices.waiting import Waiting
from tpu.unbroken import unbroken

# Between two looks at a pool that has no place now: the first pause, and how it grows up to the longest.
FIRST_LOOK_S, LONGEST_LOOK_S, LOOK_GROWTH = 0.5, 15.0, 1.3
# While a slice is being made, the pool is looked at for a free one this often.
LOOK_BESIDE_S = 15.0
# How long the maker of a slice may take from its intent until the cloud knows of it.
UNHEARD_S = 120.0
MADE_LOOK_S = 2.0
CONNECT_S = 300.0


class Placing:
    """`give_up` gets the name of a slice that was taken and is unfit, and why: it is given back or deleted."""

    def __init__(self, run: RunContext, give_up: Callable[[str, str], Awaitable[None]]) -> None:
        self._run = run
        self._give_up = give_up
        self._said = ""
        self._waiting = Waiting()
        self._ending: set[asyncio.Task[None]] = set()
        self.clearance = Clearance(run)

    async def place(self, on_preempted: Callable[[str, str], Awaitable[None]]) -> ReadySlice:
        """A ready slice on which the run holds the chips that it wants.

        `on_preempted` gets name and reason of a slice that was taken while it was being made; another one is made.

        Raises:
            tpu.cloud.errors.CloudError: every candidate is refused for good.
            tpu.slices.provision.NotReady: none was ready in time, or the pool had no place for too long.
        """
        try:
            await self.clearance.check()
            async with shown_waiting(self._run.run_dir, self._run.clock) as self._waiting:
                return await self._place(on_preempted)
        except CloudError as error:
            await self._run.log.note("no-slice", reason=str(error))
            raise

    async def _place(self, on_preempted: Callable[[str, str], Awaitable[None]]) -> ReadySlice:
        patience_s = self._run.record.config.slice.pool_hours * 3600
        end, pause = self._run.clock.monotonic() + patience_s, FIRST_LOOK_S
        self._said = ""
        while True:
            try:
                decision = await self._run.member.decide(await self._serving())
            except (StorageUnavailable, LeaseContended) as error:
                decision = Wait(f"the bucket does not answer: {error}")
            match decision:
                case Take():
                    if (ready := await self._move_in(decision.parts[0])) is not None:
                        return ready
                case Create():
                    if (ready := await self._make(on_preempted)) is not None:
                        return ready
                case _:
                    self._say(decision.reason)
                    if self._run.clock.monotonic() >= end:
                        raise NotReady(
                            f"no place within {patience_s / 3600:g} hours: {decision.reason}", "a place"
                        )
                    await self._run.tenure.pause(pause)
                    pause = min(pause * LOOK_GROWTH, LONGEST_LOOK_S)
                    continue
            await self._run.tenure.pause(FIRST_LOOK_S)

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._waiting.say(f"pool {self._run.record.config.pool}", reason)
            self._run.report(f"waiting for a place in the pool {self._run.record.config.pool}: {reason}")

    async def _serving(self) -> tuple[Candidate, ...]:
        """Candidates whose zones serve, as far as the project remembers."""
        candidates = tuple(self._run.record.config.slice.choices)
        # Asked again and again; that nothing is remembered is said once something is made.
        return await remembered(self._run.memory.serving(candidates), candidates, lambda _: None)

    # --- a slice that is made ---

    async def _make(self, on_preempted: Callable[[str, str], Awaitable[None]]) -> ReadySlice | None:
        """A slice that was made for the run; None if a place was found meanwhile, or the pool is full."""
        making = asyncio.create_task(
            acquire(
                self._run.cloud,
                launch.slice_wish(self._run.record.config, self._run.connection, self._run.identity),
                RunIntents(self._run, on_preempted),
                self._run.memory,
                self._run.clock,
                self._run.report,
                self._run.tenure.still_wanted,
                waiting=self._waiting,
                beside=self._end_beside,
            )
        )
        looking = asyncio.create_task(self._until_better())
        try:
            await asyncio.wait({making, looking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            looking.cancel()
            making.cancel()
            # What was asked for is deleted, and that is waited for.
            await unbroken(asyncio.wait({making, looking}))
        if making.cancelled():
            self._run.report(
                "a place in the pool has become free: what was asked for meanwhile is not needed"
            )
            return None
        try:
            ready = making.result()
        except Withdrawn as error:
            self._say(str(error))
            return None
        await self._run.log.note("slice-ready", slice=ready.name)
        await self._run.member.ready(ready.name)
        return ready

    def _end_beside(self, work: Coroutine[Any, Any, None]) -> None:
        self._ending.add(asyncio.create_task(work))

    async def settle(self) -> None:
        """Wait until what has lost a race is gone, or is known to be left: its intent stands then."""
        while self._ending:
            ended, self._ending = await asyncio.wait(self._ending)
            for task in ended:
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._run.report(f"what has lost a race is still to be deleted: {error}")

    async def _until_better(self) -> None:
        while True:
            await self._run.clock.sleep(LOOK_BESIDE_S)
            try:
                if await self._run.member.better_than_making(await self._serving()):
                    return
            except StorageUnavailable:
                continue  # the making goes on; its own calls will tell

    # --- a slice that is there ---

    async def _move_in(self, part: Part) -> ReadySlice | None:
        """Take chips and make sure that they can be used; None if somebody was quicker, or they cannot."""
        await self._run.tenure.check()
        try:
            lease = await self._run.member.take(part)
        except LeaseRefused:
            return None
        name = lease.slice
        try:
            await self._until_made(name)
        except BaseException as error:  # nothing of it is in the run's history yet
            await unbroken(self._run.member.release(name))
            if not isinstance(error, _Unfit):
                raise
            self._say(f"{name}: {error}")
            return None
        await self._run.log.note(
            "slice-leased", slice=name, chips=list(part.chips), **asdict(lease.candidate)
        )
        self._run.report(f"took {_described(lease, part)} from the pool {lease.pool}")
        try:
            ready = await self._find(lease)
            await unless_lost(self._clear(ready), lambda: self._condition(lease))
        except (CloudError, HostUnreachable, SliceLost, _Unfit) as error:
            await self._run.member.quarantine(name, str(error))
            await self._give_up(name, str(error))
            return None
        except (asyncio.CancelledError, NoLongerWanted):
            await unbroken(self._leave_again(name))
            raise
        return ready

    async def _leave_again(self, name: str) -> None:
        """Nothing of the run was started there: the slice is as it was."""
        why = "no longer wanted"
        if await self._run.member.part_with(name, clean=True, why=why):
            await self._run.log.note("slice-released", slice=name, why=why)

    async def _find(self, lease: Lease) -> ReadySlice:
        """The slice of a lease, and the way to its hosts.

        Raises:
            CloudError: it is lost, or not ready again in time.
        """
        return await provision(
            self._run.cloud, self._run.request.of(lease.candidate), lease.slice, self._run.clock, self._run.report,
            self._run.tenure.still_wanted, keep=True, find_only=True,
        )  # fmt: skip

    async def _until_made(self, name: str) -> None:
        """Wait until a slice is ready for the first time.

        Raises:
            _Unfit: its maker has given it up, it takes too long, or there is a better place meanwhile.
        """
        began = looked = self._run.clock.monotonic()
        minutes = self._run.record.config.slice.ready_minutes
        unheard_since: float | None = None
        while True:
            lease = await self._run.member.read(name)
            if lease is None or not lease.open:
                raise _Unfit(f"its maker has given it up{f': {lease.why}' if lease and lease.why else ''}")
            if lease.state is LeaseState.READY:
                return
            now = self._run.clock.monotonic()
            if (
                lease.holder(lease.creator) is None
            ):  # its maker does not hold it (any more): the cloud is asked
                seen = await self._condition(lease, was_ready=False)
                if seen.usable:
                    await self._run.member.ready(name)
                    return
                unheard_since = (unheard_since or now) if seen.lost else None
                if seen.lost and (not seen.gone or now - (unheard_since or now) >= UNHEARD_S):
                    raise _Unfit(seen.reason)
            if now - began >= minutes * 60:
                raise _Unfit(f"not ready within {minutes:g} minutes")
            if now - looked >= LOOK_BESIDE_S:
                looked = now
                if await self._run.member.better_than_making(await self._serving()):
                    raise _Unfit("there is a place on another one")
            self._say(f"{name} is being made")
            await self._run.tenure.pause(MADE_LOOK_S)

    async def _condition(self, lease: Lease, was_ready: bool = True) -> LifeView:
        zone, spot = lease.candidate.zone, lease.candidate.provisioning in PREEMPTIBLE
        return await slice_condition(self._run.cloud, zone, lease.slice, spot=spot, was_ready=was_ready)

    async def _clear(self, ready: ReadySlice) -> None:
        """Confirm on its hosts that nothing of earlier tenants runs on these chips.

        Raises:
            HostUnreachable: a host cannot be reached.
            _Unfit: something cannot be ended, or somebody else holds a chip.
        """
        tenant = self._run.member.held[ready.name].tenant
        async with self._run.connect(ready.hosts, CONNECT_S) as group:
            cleared = await clear_chips(group, tenant)
        if ended := sorted({attempt for one in cleared for attempt in one.ended}):
            self._run.report(f"{ready.name}: ended what was left of {', '.join(ended)}")
        if troubles := [f"{one.host.name}: {one.trouble}" for one in cleared if one.trouble]:
            raise _Unfit("; ".join(troubles))


class _Unfit(RuntimeError):
    """A slice of the pool that cannot be used."""


def _described(lease: Lease, part: Part) -> str:
    if len(part.chips) == lease.chips:
        return lease.slice
    return f"chip(s) {', '.join(map(str, part.chips))} of {lease.slice}"
