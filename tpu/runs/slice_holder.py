"""The slice that a run holds: asked for under a name that is written down first, reached, filled with code, deleted.

Every step is in the run's history before it is taken, so that whoever takes the run up finds what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tpu.clock import Clock
from tpu.cloud import CloudError, TpuCloud
from tpu.connection import Connection
from tpu.hosts.connect import connect_all
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import Identity
from tpu.runs import launch
from tpu.runs.code import Bundle, relay_bundle
from tpu.runs.event_log import EventLog, undeleted
from tpu.runs.record import RunRecord
from tpu.runs.sync import Installed, sync_code
from tpu.runs.tenure import Tenure
from tpu.runs.trouble import unless_lost
from tpu.slices.condition import LifeView, slice_condition
from tpu.slices.names import slice_name
from tpu.slices.provision import NoLongerWanted, NotReady, ReadySlice, delete_slice, provision

CONNECT_S = 300.0
DELETE_S = 1800.0
# Between two tries to take up a slice whose cloud does not answer.
FIND_AGAIN_S = 5.0
# Between two requests that the cloud refused: the first pause, doubled up to the longest.
REFUSED_FIRST_S, REFUSED_LONGEST_S = 1.0, 120.0


class SliceHolder:
    """At most one ready slice (`slice`), and what is `installed` on it."""

    def __init__(
        self,
        record: RunRecord,
        log: EventLog,
        tenure: Tenure,
        cloud: TpuCloud,
        connection: Connection,
        identity: Identity,
        code: Bundle,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        self.slice: ReadySlice | None = None
        self.installed: Installed | None = None
        self._record = record
        self._log = log
        self._tenure = tenure
        self._cloud = cloud
        self._connection = connection
        self._identity = identity
        self._code = code
        self._clock = clock
        self._report = report
        self._relay: Bundle | None = None

    async def provision(self) -> ReadySlice:
        """A ready slice: the one at hand, or a new one whose name and intent are written before it is asked for.

        Raises:
            tpu.cloud.errors.CloudError: the cloud refused; its kind says whether another try makes sense.
            tpu.slices.provision.NotReady: none was ready in time.
        """
        if self.slice is not None:
            return self.slice
        await self._wait_after_refusals()
        await self._tenure.check()
        for left in undeleted(self._log.events):
            await self.delete(left, "left before another one is made")
        config = self._record.config
        number = sum(event.kind == "slice-intended" for event in self._log.events) + 1
        name = slice_name(config.name, number, f"{self._record.created}")
        request = launch.slice_request(config, self._connection, self._identity)
        await self._log.note(
            "slice-intended", slice=name, zone=request.zone, accelerator_type=request.accelerator_type,
            provisioning=request.provisioning, price_an_hour=config.slice.price_an_hour,
        )  # fmt: skip
        await self._log.note("provision-started", slice=name)
        try:
            self.slice = await provision(
                self._cloud, request, name, self._clock, self._report, self._tenure.still_wanted
            )
        except (CloudError, NoLongerWanted, asyncio.CancelledError) as error:
            reason = str(error) or "cancelled"
            await self._log.note("provision-failed", slice=name, reason=reason)
            if not getattr(error, "__notes__", None):  # such a note says that the deletion is not confirmed
                await self._log.note("slice-deleted", slice=name, why=reason)
            raise
        await self._log.note("slice-ready", slice=name)
        return self.slice

    async def _wait_after_refusals(self) -> None:
        """Wait longer each time the cloud has refused in a row; a preemption while creating is no refusal.

        Raises:
            NotReady: it has refused for as long as a slice may take to be ready.
        """
        refused, since = 0, self._clock.time()
        for event in reversed(self._log.events):
            if event.kind in ("slice-ready", "attempt-ended", "driver-started"):
                break
            refused += event.kind == "provision-failed"
            if event.kind == "slice-intended":
                since = event.time
        if refused:
            patience_s = self._record.config.slice.ready_minutes * 60
            if self._clock.time() - since > patience_s:
                raise NotReady(f"refused {refused} time(s) in {patience_s / 60:g} minutes", "a slice")
            seconds = min(REFUSED_FIRST_S * 2 ** (refused - 1), REFUSED_LONGEST_S)
            self._report(f"the cloud refused {refused} time(s) in a row; asking again in {seconds:.0f} s")
            await self._tenure.pause(seconds)

    async def delete(self, name: str, why: str) -> None:
        """Delete a slice; returns once the cloud says that it is gone."""
        await self._tenure.check()
        self._report(f"deleting slice {name}: {why}")
        await delete_slice(self._cloud, self._record.config.slice.zone, name, self._clock, DELETE_S)
        if self.slice is not None and self.slice.name == name:
            self.slice, self.installed = None, None
        await self._log.note("slice-deleted", slice=name, why=why)

    async def condition(self) -> LifeView:
        assert self.slice is not None
        taken = self.slice
        return await slice_condition(self._cloud, taken.zone, taken.name, spot=taken.request.spot)

    @contextlib.asynccontextmanager
    async def hosts(self, deadline_s: float = CONNECT_S) -> AsyncIterator[HostGroup]:
        assert self.slice is not None
        async with connect_all(
            self.slice.hosts, self._identity, self._connection, deadline_s, self._report
        ) as group:
            yield group

    async def sync(self) -> Installed:
        """Bring code and environment to the slice, unless it has them.

        Raises:
            tpu.runs.sync.SyncError: a host refused them.
            tpu.hosts.connect.HostUnreachable: a host cannot be reached.
            tpu.runs.trouble.SliceLost: the cloud took the slice meanwhile.
        """
        if self.installed is None:
            await self._log.note("sync-started")
            self.installed = await unless_lost(self._install(), self.condition)
            await self._log.note("sync-done", code=self._code.sha256)
        return self.installed

    async def _install(self) -> Installed:
        config = self._record.config
        async with self.hosts() as group:
            return await sync_code(
                group, [self._code, await self._own_code()], config.environment,
                launch.requirements_text(config, self._code),
                self._connection.host_python_for(config.framework), self._report, config.framework,
            )  # fmt: skip

    async def _own_code(self) -> Bundle:
        """Packed once: a run that goes on after a preemption goes on with the same."""
        if self._relay is None:
            self._relay = await asyncio.to_thread(relay_bundle)
        return self._relay

    async def find_again(self, name: str) -> ReadySlice | None:
        """The slice that an earlier driver asked for, once it is ready; None if it is lost meanwhile.

        A gang may be training on it, so a cloud that does not answer is waited for.

        Raises:
            CloudError: it was not ready in time, or the cloud refuses for good.
        """
        request = launch.slice_request(self._record.config, self._connection, self._identity)
        end = self._clock.monotonic() + request.deadline_s
        while True:
            try:
                found = await provision(
                    self._cloud,
                    request,
                    name,
                    self._clock,
                    self._report,
                    self._tenure.still_wanted,
                    keep=True,
                )
                break
            except CloudError as error:
                if (await self.left_behind(name)).lost:
                    return None
                if not error.retryable or self._clock.monotonic() > end:
                    raise
                self._report(f"cannot take {name} up yet, trying again: {error}")
            await self._tenure.pause(FIND_AGAIN_S)
        if not self._was_ready(name):
            await self._log.note("slice-ready", slice=name)
        return found

    def _was_ready(self, name: str) -> bool:
        return any(e.kind == "slice-ready" and e.detail["slice"] == name for e in self._log.events)

    async def left_behind(self, name: str) -> LifeView:
        """What the cloud says of a slice that an earlier driver asked for: it may still be on its way."""
        wanted = self._record.config.slice
        return await slice_condition(
            self._cloud,
            wanted.zone,
            name,
            spot=wanted.provisioning == "spot",
            was_ready=self._was_ready(name),
        )
