"""The slice that a run holds: had from its pool or made, reached, filled with code, and given back or deleted.

Every step is in the run's history before it is taken, so that whoever takes the run up finds what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

from tpu.checkpoint.retry import StorageUnavailable
from tpu.cloud import CloudError
from tpu.hosts.connect import HostUnreachable
from tpu.hosts.gang import Tenant
from tpu.hosts.group import HostGroup
from tpu.runs import launch
from tpu.runs.blaming import avoided
from tpu.runs.code import Bundle, relay_bundle
from tpu.runs.context import RunContext
from tpu.runs.egress import note_egress
from tpu.runs.event_log import candidate_of, undeleted
from tpu.runs.eviction import Eviction
from tpu.runs.parting import Parting, left_behind, was_ready
from tpu.runs.placing import Placing
from tpu.runs.sync import Installed, sync_code
from tpu.runs.trouble import SliceLost, unless_lost
from tpu.slices.condition import Condition, LifeView
from tpu.slices.lease_book import LeaseContended
from tpu.slices.life_limit import save_at
from tpu.slices.monitor import Watch
from tpu.slices.provision import NotReady, ReadySlice, provision

CONNECT_S = 300.0
# To hosts that were connected to a moment ago; an SSH server that was killed is back within seconds.
CONNECT_AGAIN_S = 15.0
# Between two tries to take up a slice whose cloud does not answer.
FIND_AGAIN_S = 5.0


class SliceHolder:
    """At most one ready slice (`slice`), and what is `installed` on it."""

    def __init__(self, run: RunContext) -> None:
        self.slice: ReadySlice | None = None
        self.installed: Installed | None = None
        self._run = run
        self._relay: Bundle | None = None
        run.member.avoided |= avoided(run.log.events)
        self._word: Watch | None = None
        self._parting = Parting(run, self._drop)
        self._placing = Placing(run, self.delete)

    async def provision(self, on_preempted: Callable[[str, str], Awaitable[None]]) -> ReadySlice:
        """A ready slice on which the run holds its chips: the one at hand, one of the pool, or a new one.

        `on_preempted` gets name and reason of a slice that was taken while it was being made; another one is made.

        Raises:
            tpu.cloud.errors.CloudError: every candidate is refused for good.
            tpu.slices.provision.NotReady: none was ready in time.
        """
        if self.slice is not None:
            return self.slice
        await self._run.tenure.check()
        await self.settle()
        for left in undeleted(self._run.log.events):
            await self.delete(left, "left before another one is had")
        await self._run.log.note("slice-wanted")
        self.slice = await self._placing.place(on_preempted)
        return self.slice

    async def note_egress(self, attempt: int) -> None:
        """Put the cost of an ended attempt's traffic between regions, if it is one, into the run's history."""
        await note_egress(self._run, self._placing.clearance, attempt)

    async def hold_on(self) -> Tenant:
        """Renew the lease of the slice at hand, and return by which one the run has which chips.

        Raises:
            tpu.runs.trouble.SliceLost: it is lost.
        """
        assert self.slice is not None
        name = self.slice.name
        if (why := await self.lease_lost()) is not None or (held := self._run.member.held.get(name)) is None:
            reason = why or f"no lease of {name} is held"
            raise SliceLost(LifeView(Condition.LOST, reason, preempted=True))
        return held.tenant

    async def lease_lost(self) -> str | None:
        """Renew the lease of the slice at hand, and say how it was lost if it was; None, too, if nobody answers."""
        assert self.slice is not None
        if self.slice.name in self._run.member.held:
            with contextlib.suppress(StorageUnavailable, LeaseContended):
                await self._run.member.renew(self.slice.name)
        return self.why_lost(self.slice.name)

    async def settle(self) -> None:
        """Wait until the slices that lost a race against the one at hand are gone, or known to be left."""
        await self._placing.settle()

    async def leave(self) -> None:
        """Hold on to nothing any more: what is not given back expires."""
        await self.settle()
        await self._run.member.leave()

    def why_leave(self, committed: int, eviction: Eviction) -> str | None:
        """Why the gang on the slice at hand is to be ended now; None if it may go on. `committed` is its last step."""
        assert self.slice is not None
        name = self.slice.name
        if (lost := self.why_lost(name)) is not None:
            return lost
        patience_s = self._run.member.settings.evict_minutes * 60
        claim = self._run.member.evicted.get(name)
        return eviction.why_leave(claim, committed, self._run.clock.monotonic(), patience_s)

    def why_lost(self, name: str) -> str | None:
        """How the lease of a slice was lost, if it was: what it was of may be used by others now."""
        return self._run.member.lost.get(name)

    async def quarantine(self, name: str, why: str) -> None:
        """Nobody may take this slice any more, whoever has it."""
        await self._run.member.quarantine(name, why)

    def avoid(self, name: str) -> None:
        """Never take this slice of the pool again."""
        self._run.member.avoided.add(name)

    async def part_with(self, why: str, keep: bool = False) -> None:
        """Give the slice at hand back, whose gang is confirmed dead, if the pool can use it; else delete it.

        `keep` says that somebody takes it next, so that the pool can.
        """
        assert self.slice is not None
        await self._parting.part_with(self.slice.name, why, await self.condition(), keep)

    async def delete(self, name: str, why: str) -> None:
        """Delete a slice of the run, see Parting.delete; returns once the cloud says that it is gone."""
        await self._parting.delete(name, why)

    def _drop(self, name: str) -> None:
        if self._word is not None and self._word.name == name:
            self._word.close()
            self._word = None
        if self.slice is not None and self.slice.name == name:
            self.slice, self.installed = None, None

    @property
    def word(self) -> Watch:
        """What the cloud says of the slice at hand, which is watched from the first question on."""
        assert self.slice is not None
        taken = self.slice
        if self._word is None or self._word.name != taken.name:
            if self._word is not None:
                self._word.close()
            self._word = self._run.monitor.watch(
                taken.zone, taken.name, spot=taken.request.spot, was_ready=True
            )
        return self._word

    async def condition(self) -> LifeView:
        """What the cloud says of the slice at hand now; one whose lease was lost is as good as lost."""
        assert self.slice is not None
        if (lost := self.why_lost(self.slice.name)) is not None:
            return LifeView(Condition.LOST, lost, preempted=True)
        return await self.word.look_now()

    def save_at(self) -> tuple[float, str] | None:
        """When a gang has to save because the life of the slice at hand is over soon, and why; None if it is not."""
        assert self.slice is not None
        request = self.slice.request
        return save_at(
            self.slice.node.created,
            request.provisioning,
            request.max_run_s,
            self._run.record.config.grace_seconds,
        )

    async def until_repaired(self) -> bool:
        """Wait for the slice at hand, which comes back by itself; False if it did not, and is deleted."""
        assert self.slice is not None
        name, minutes = self.slice.name, self._run.record.config.slice.repair_minutes
        self._run.report(f"waiting up to {minutes:g} minutes for {name}, which is being repaired")
        await self._run.log.note("repair-wait-started", slice=name)
        self.installed = None  # a repair may give back an empty disk
        try:
            found = await self.find_again(name, minutes * 60)
        except NotReady as error:
            self._run.report(str(error))
            found = None
        if found is None:
            await self.delete(name, f"not ready again within {minutes:g} minutes of repair, or lost by it")
        else:
            self.slice = found
        await self._run.log.note("repair-wait-done", slice=name, ready=found is not None)
        return found is not None

    @contextlib.asynccontextmanager
    async def hosts(self, deadline_s: float | None = None) -> AsyncIterator[HostGroup]:
        """Connections to all hosts of the slice at hand, within `deadline_s` or what a boot may take at most."""
        assert self.slice is not None
        within_s = CONNECT_S if deadline_s is None else deadline_s
        async with self._run.connect(self.slice.hosts, within_s) as group:
            yield group

    async def sync(self) -> Installed:
        """Bring code and environment to the slice, unless it has them.

        Raises:
            tpu.runs.sync.SyncError: a host refused them.
            tpu.hosts.connect.HostUnreachable: a host cannot be reached.
            tpu.runs.trouble.SliceLost: the cloud took the slice meanwhile.
        """
        if self.installed is None:
            await self._run.log.note("sync-started")
            self.installed = await unless_lost(self._install(), self.condition)
            await self._run.log.note("sync-done", code=self._run.code.sha256)
        return self.installed

    async def _install(self) -> Installed:
        """Once more if a connection drops meanwhile: its host may be well, and a slice is worth a second look."""
        try:
            return await self._bring(CONNECT_S)
        except HostUnreachable as error:
            self._run.report(f"bringing the code once more: {error}")
            return await self._bring(CONNECT_AGAIN_S)

    async def _bring(self, connect_s: float) -> Installed:
        config = self._run.record.config
        async with self.hosts(connect_s) as group:
            return await sync_code(
                group, [self._run.code, await self._own_code()], config.environment,
                launch.requirements_text(config, self._run.code),
                self._run.connection.host_python_for(config.framework), self._run.report, config.framework,
            )  # fmt: skip

    async def _own_code(self) -> Bundle:
        """Packed once: a run that goes on after a preemption goes on with the same."""
        if self._relay is None:
            self._relay = await asyncio.to_thread(relay_bundle)
        return self._relay

    async def find_again(self, name: str, within_s: float | None = None) -> ReadySlice | None:
        """The slice that an earlier driver had or asked for, once it is ready; None if it, or its lease, is lost.

        It is waited for as long as a new one would be, or `within_s`: a gang may be training on it, so a cloud that
        does not answer is no reason to give it up.

        Raises:
            CloudError: it was not ready in time, or the cloud refuses for good.
        """
        candidate = candidate_of(self._run.log.events, name)
        if not await self._run.member.take_up(name, candidate):
            return None
        request = self._run.request.of(candidate)
        if within_s is not None:
            request = dataclasses.replace(request, deadline_s=within_s)
        end = self._run.clock.monotonic() + request.deadline_s
        while True:
            try:
                found = await provision(
                    self._run.cloud,
                    request,
                    name,
                    self._run.clock,
                    self._run.report,
                    self._run.tenure.still_wanted,
                    keep=True,
                    find_only=self._was_leased(name),
                )
                break
            except CloudError as error:
                if (await self.left_behind(name)).lost:
                    return None
                if not error.retryable or self._run.clock.monotonic() > end:
                    raise
                self._run.report(f"cannot take {name} up yet, trying again: {error}")
            await self._run.tenure.pause(FIND_AGAIN_S)
        if not was_ready(self._run.log.events, name):
            await self._run.log.note("slice-ready", slice=name)
            await self._run.member.ready(name)
        return found

    def _was_leased(self, name: str) -> bool:
        return any(e.kind == "slice-leased" and e.detail["slice"] == name for e in self._run.log.events)

    async def left_behind(self, name: str) -> LifeView:
        """What the cloud says of a slice that the run has had or asked for: it may still be on its way."""
        return await left_behind(self._run.cloud, self._run.log.events, name)
