"""The slice that a run holds: asked for under a name that is written down first, reached, filled with code, deleted.

Every step is in the run's history before it is taken, so that whoever takes the run up finds what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import PREEMPTIBLE, CloudError, TpuCloud
from tpu.connection import Connection
from tpu.hosts.connect import connect_all
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import Identity
from tpu.runs import launch
from tpu.runs.code import Bundle, relay_bundle
from tpu.runs.event_log import EventLog, candidate_of, ready_of_early_death, undeleted
from tpu.runs.intents import RunIntents
from tpu.runs.record import RunRecord
from tpu.runs.sync import Installed, sync_code
from tpu.runs.tenure import Tenure
from tpu.runs.trouble import unless_lost
from tpu.slices.acquire import acquire
from tpu.slices.condition import LifeView, slice_condition
from tpu.slices.project_memory import memory_of_bucket
from tpu.slices.provision import ReadySlice, delete_slice, provision
from tpu.slices.shared import MalformedShared, SharedContended

CONNECT_S = 300.0
DELETE_S = 1800.0
# Between two tries to take up a slice whose cloud does not answer.
FIND_AGAIN_S = 5.0


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
        self._memory = memory_of_bucket(connection.bucket, clock)

    async def provision(self, on_preempted: Callable[[str, str], Awaitable[None]]) -> ReadySlice:
        """A ready slice: the one at hand, or a new one of any candidate, each written down before it is asked for.

        `on_preempted` gets name and reason of a slice that was taken while it was being made; another one is made.

        Raises:
            tpu.cloud.errors.CloudError: every candidate is refused for good.
            tpu.slices.provision.NotReady: none was ready in time.
        """
        if self.slice is not None:
            return self.slice
        await self._tenure.check()
        for left in undeleted(self._log.events):
            await self.delete(left, "left before another one is made")
        await self._log.note("slice-wanted")
        self.slice = await acquire(
            self._cloud,
            launch.slice_wish(self._record.config, self._connection, self._identity),
            RunIntents(self._record, self._log, on_preempted),
            self._memory,
            self._clock,
            self._report,
            self._tenure.still_wanted,
        )
        await self._log.note("slice-ready", slice=self.slice.name)
        return self.slice

    async def delete(self, name: str, why: str) -> None:
        """Delete a slice; returns once the cloud says that it is gone."""
        await self._tenure.check()
        self._report(f"deleting slice {name}: {why}")
        candidate = candidate_of(self._log.events, name)
        await delete_slice(self._cloud, candidate.zone, name, self._clock, DELETE_S)
        if self.slice is not None and self.slice.name == name:
            self.slice, self.installed = None, None
        await self._log.note("slice-deleted", slice=name, why=why)
        if (ready := ready_of_early_death(self._log.events, name)) is not None:
            # What the project remembers of its zones is of use, not a condition.
            with contextlib.suppress(StorageUnavailable, SharedContended, MalformedShared):
                await self._memory.note(candidate, "early death", ready)

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
        candidate = candidate_of(self._log.events, name)
        request = launch.slice_request(self._record.config, self._connection, self._identity).of(candidate)
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
        candidate = candidate_of(self._log.events, name)
        return await slice_condition(
            self._cloud,
            candidate.zone,
            name,
            spot=candidate.provisioning in PREEMPTIBLE,
            was_ready=self._was_ready(name),
        )
