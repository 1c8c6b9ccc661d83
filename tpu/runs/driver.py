"""Carry one run to its end: get a slice, start a gang on it, wait for commits, and say why an attempt ended.

Everything the driver knows stands in the bucket (record, fence, events, controller), so a driver that dies at any
moment is replaced by another one that reads it. It checks its right to act before each creation, deletion and kill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from tpu.checkpoint.fence import Commit, Fence, close_attempt, load_fence, open_attempt, update_fence
from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError, ErrorKind, TpuCloud
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import HostUnreachable, connect_all
from tpu.hosts.gang import GangSpec, end_gang, gang_status, start_gang
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import Identity
from tpu.runs import launch
from tpu.runs.code import Bundle, relay_bundle
from tpu.runs.controller import BEAT_S, Controller, ControllerLost
from tpu.runs.event_log import EventLog
from tpu.runs.goodput import waste_begins
from tpu.runs.record import RunRecord
from tpu.runs.stop_request import stop_requested
from tpu.runs.sync import Installed, SyncError, sync_code
from tpu.runs.trouble import CLOUD_WORD_S, SliceLost, condition_after_trouble, unless_lost
from tpu.runs.watch import GangView, GangWatch, Listener
from tpu.slices.budget import Budgets, Exhausted, allows, back_off_s
from tpu.slices.condition import Condition, LifeView, slice_condition
from tpu.slices.names import slice_name
from tpu.slices.provision import NoLongerWanted, ReadySlice, delete_slice, provision
from tpu.slices.verdict import Verdict, VerdictKind, give_verdict, needs_the_cloud

CLOUD_POLL_S = 5.0
CONNECT_S = 300.0
# The hosts of a gang that runs have been up already.
TAKE_UP_S = 30.0
DELETE_S = 1800.0
# Between two requests that the cloud refused: the first pause, doubled up to the longest.
REFUSED_FIRST_S, REFUSED_LONGEST_S = 1.0, 120.0
# What a gang that has fallen apart gets from SIGTERM to SIGKILL: no checkpoint can come of it any more.
FALLEN_GRACE_S = 1.0
# A commit is looked for this often; the end of an attempt wakes at once.
LOOK_S = 0.2


class AttemptEnded(RuntimeError):
    """An attempt ended before the step that was waited for; `retry` says whether the budget allows another."""

    def __init__(self, verdict: Verdict, retry: bool, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.retry = retry


class StopRequested(NoLongerWanted):
    """Somebody asked the run to stop (`relay stop`)."""


class RunDriver:
    """Acts for one run while its controller holds the right to."""

    def __init__(
        self,
        *,
        record: RunRecord,
        run_dir: str,
        connection: Connection,
        cloud: TpuCloud,
        identity: Identity,
        controller: Controller,
        log: EventLog,
        code: Bundle,
        secrets: dict[str, str],
        clock: Clock,
        report: Callable[[str], None],
        listener: Listener,
    ) -> None:
        self.record = record
        self.run_dir = run_dir
        self.log = log
        self.report = report
        self._connection = connection
        self._cloud = cloud
        self._identity = identity
        self._controller = controller
        self._code = code
        self._secrets = secrets
        self._clock = clock
        self._listener = listener
        self._slice: ReadySlice | None = None
        self._installed: Installed | None = None
        self._relay: Bundle | None = None
        self._watch: GangWatch | None = None
        self._spec: GangSpec | None = None
        self._attempt_task: asyncio.Task[Verdict] | None = None
        self._concluding = False
        self._beat_task: asyncio.Task[None] | None = None
        self._interruption: asyncio.Future[None] | None = None

    # --- the right to act -------------------------------------------------------------------------------------

    async def may_act(self) -> None:
        """Raises ControllerLost if another process drives the run now."""
        await asyncio.to_thread(self._controller.check)

    def start_beating(self) -> None:
        """From now on show that this process lives, and hear whether it is to stop or has lost the run."""
        self._interruption = asyncio.get_running_loop().create_future()

        async def beat() -> None:
            while True:
                try:
                    await asyncio.to_thread(self._controller.beat)
                    asked = await asyncio.to_thread(stop_requested, self.run_dir, self._controller.term)
                except ControllerLost as error:
                    self._interrupt(error)
                    return
                except StorageUnavailable as error:
                    self.report(f"the bucket does not answer; trying again ({error})")
                else:
                    if asked:
                        self._interrupt(StopRequested("stopped by request"))
                await self._clock.sleep(BEAT_S)

        self._beat_task = asyncio.create_task(beat())

    def _interrupt(self, error: Exception) -> None:
        if self._interruption is not None and not self._interruption.done():
            self._interruption.set_exception(error)
            self._interruption.exception()  # seen by whoever waits next; nobody need wait

    async def leave(self) -> None:
        """Stop following and beating, and give the right back. The gang goes on if there is one."""
        for task in (self._attempt_task, self._beat_task):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        await asyncio.to_thread(self._controller.release)

    async def note(self, kind: str, **detail: Any) -> None:
        await asyncio.to_thread(lambda: self.log.append(kind, **detail))

    # --- what stands in the bucket ----------------------------------------------------------------------------

    async def fence(self) -> Fence:
        return await asyncio.to_thread(load_fence, self.run_dir)

    async def committed(self, step: int) -> bool:
        """Whether a checkpoint of `step` or later counts; for a foreign command, whether it has ended well."""
        if not self.record.config.commits:
            return self.finished
        newest = (await self.fence()).newest()
        return newest is not None and newest.step >= step

    @property
    def finished(self) -> bool:
        return any(
            event.kind == "attempt-ended"
            and event.detail["verdict"] == VerdictKind.FINISHED.value
            and event.detail["steps"] == self.record.config.steps
            for event in self.log.events
        )

    @property
    def code_sha256(self) -> str:
        return self._code.sha256

    @property
    def attempt(self) -> int | None:
        """Number of the attempt whose gang lives, or None."""
        return self._spec.attempt if self._attempt_task is not None and self._spec is not None else None

    @property
    def view(self) -> GangView | None:
        return self._watch.view if self._watch is not None else None

    def slices_not_deleted(self) -> list[str]:
        """Names of slices that were asked for and whose deletion the cloud has not confirmed, oldest first."""
        names = {e.detail["slice"]: None for e in self.log.events if e.kind == "slice-intended"}
        for event in self.log.events:
            if event.kind == "slice-deleted":
                names.pop(event.detail["slice"], None)
        return list(names)

    # --- slices -----------------------------------------------------------------------------------------------

    @property
    def has_slice(self) -> bool:
        return self._slice is not None

    async def provision(self) -> ReadySlice:
        """A ready slice: the one at hand, or a new one whose name and intent are written before it is asked for.

        Raises:
            tpu.cloud.errors.CloudError: the cloud refused; its kind says whether another try makes sense.
            tpu.slices.provision.NotReady: none was ready in time.
        """
        if self._slice is not None:
            return self._slice
        await self._wait_after_refusals()
        await self.may_act()
        for left in self.slices_not_deleted():
            await self.delete(left, "left before another one is made")
        config = self.record.config
        number = sum(event.kind == "slice-intended" for event in self.log.events) + 1
        name = slice_name(config.name, number, f"{self.record.created}")
        request = launch.slice_request(config, self._connection, self._identity)
        await self.note(
            "slice-intended", slice=name, zone=request.zone, accelerator_type=request.accelerator_type,
            provisioning=request.provisioning, price_an_hour=config.slice.price_an_hour,
        )  # fmt: skip
        await self.note("provision-started", slice=name)
        try:
            self._slice = await provision(
                self._cloud, request, name, self._clock, self.report, self._still_wanted
            )
        except (CloudError, NoLongerWanted, asyncio.CancelledError) as error:
            reason = str(error) or "cancelled"
            await self.note("provision-failed", slice=name, reason=reason)
            if not getattr(error, "__notes__", None):  # such a note says that the deletion is not confirmed
                await self.note("slice-deleted", slice=name, why=reason)
            if isinstance(error, CloudError) and error.kind is ErrorKind.PREEMPTED:
                await self._note_attempt_without_gang(None, name, VerdictKind.PREEMPTED, reason)
            raise
        await self.note("slice-ready", slice=name)
        return self._slice

    async def _wait_after_refusals(self) -> None:
        """Wait longer each time the cloud has refused in a row; a preemption while creating is no refusal."""
        refused = 0
        for event in reversed(self.log.events):
            if event.kind in ("slice-ready", "attempt-ended"):
                break
            refused += event.kind == "provision-failed"
        if refused:
            seconds = min(REFUSED_FIRST_S * 2 ** (refused - 1), REFUSED_LONGEST_S)
            self.report(f"the cloud refused {refused} time(s) in a row; asking again in {seconds:.0f} s")
            await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than the run is wanted and ours."""
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            awaited = {sleep} | ({self._interruption} if self._interruption else set())
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
        await self._still_wanted()

    async def _still_wanted(self) -> None:
        if self._interruption is not None and self._interruption.done():
            self._interruption.result()

    async def delete(self, name: str, why: str) -> None:
        """Delete a slice; returns once the cloud says that it is gone."""
        await self.may_act()
        self.report(f"deleting slice {name}: {why}")
        await delete_slice(self._cloud, self.record.config.slice.zone, name, self._clock, DELETE_S)
        if self._slice is not None and self._slice.name == name:
            self._slice, self._installed = None, None
        await self.note("slice-deleted", slice=name, why=why)

    async def _condition(self) -> LifeView:
        assert self._slice is not None
        taken = self._slice
        return await slice_condition(self._cloud, taken.zone, taken.name, spot=taken.request.spot)

    @contextlib.asynccontextmanager
    async def _hosts(self, deadline_s: float = CONNECT_S) -> AsyncIterator[HostGroup]:
        assert self._slice is not None
        async with connect_all(
            self._slice.hosts, self._identity, self._connection, deadline_s, self.report
        ) as group:
            yield group

    # --- code -------------------------------------------------------------------------------------------------

    async def sync(self) -> Installed:
        """Bring code and environment to the slice, unless it has them.

        Raises:
            tpu.runs.sync.SyncError: a host refused them.
            tpu.hosts.connect.HostUnreachable: a host cannot be reached.
            tpu.runs.trouble.SliceLost: the cloud took the slice meanwhile.
        """
        if self._installed is None:
            await self.note("sync-started")
            self._installed = await unless_lost(self._install(), self._condition)
            await self.note("sync-done", code=self._code.sha256)
        return self._installed

    async def _install(self) -> Installed:
        config = self.record.config
        async with self._hosts() as group:
            return await sync_code(
                group, [self._code, await self._own_code()], config.environment,
                launch.requirements_text(config, self._code),
                self._connection.host_python_for(config.framework), self.report, config.framework,
            )  # fmt: skip

    async def _own_code(self) -> Bundle:
        """Packed once: a run that goes on after a preemption goes on with the same."""
        if self._relay is None:
            self._relay = await asyncio.to_thread(relay_bundle)
        return self._relay

    @contextlib.asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Around provisioning and sync: what fails there is judged by what the cloud says of the slice.

        Raises:
            AttemptEnded: a host could not be reached or refused the code.
        """
        try:
            yield
        except (HostUnreachable, SyncError, SliceLost) as error:
            assert self._slice is not None
            name, view = self._slice.name, await condition_after_trouble(self._condition, self._clock)
            if view.lost:
                kind = VerdictKind.PREEMPTED if view.preempted else VerdictKind.INFRASTRUCTURE
                reason = f"{view.reason}, before the gang had started"
            elif isinstance(error, SyncError) and view.usable:
                kind, reason = VerdictKind.USER_FAILURE, str(error)
            else:
                kind, reason = VerdictKind.INFRASTRUCTURE, str(error)
            await self._note_attempt_without_gang(None, name, kind, reason)
            if kind is not VerdictKind.USER_FAILURE:
                await self.delete(name, reason)
            raise self._ended(Verdict(kind, reason)) from error

    # --- attempts ---------------------------------------------------------------------------------------------

    async def start_attempt(self) -> int:
        """Open the next attempt and start its gang; returns its number."""
        assert self._slice is not None
        assert self._installed is not None
        await self.may_act()
        number = (await self.fence()).attempt + 1
        fence = await asyncio.to_thread(update_fence, self.run_dir, lambda f: open_attempt(f, number))
        newest = fence.newest()
        await self.note(
            "attempt-started", attempt=number, slice=self._slice.name,
            resume=newest.step if newest else None, code=self._code.sha256,
        )  # fmt: skip
        start = f"step {newest.step}" if newest else "step 0"
        self.report(f"attempt {number} starts on {self._slice.name} from {start}")
        spec = launch.gang_spec(
            self.record, self.run_dir, number, newest, self._slice, self._installed, self._secrets
        )
        self._follow(spec, newest)
        return number

    def _follow(
        self,
        spec: GangSpec,
        newest: Commit | None,
        start: bool = True,
        ended_by_us: Collection[HostAddress] = (),
    ) -> None:
        assert self._slice is not None
        self._spec, self._concluding = spec, False
        self._watch = GangWatch(
            self._slice.hosts, spec, self._connection, self._identity, self._condition, self._clock,
            self._listener, self.record.config.progress_minutes * 60, CLOUD_POLL_S,
        )  # fmt: skip
        for host in self._watch.view.hosts:
            host.ended_by_us = host.address in ended_by_us
        if newest is not None:
            self._watch.view.committed = newest.step
        self._attempt_task = asyncio.create_task(self._attempt(spec, self._watch, start))

    async def _attempt(self, spec: GangSpec, watch: GangWatch, start: bool) -> Verdict:
        if start:
            try:
                await unless_lost(self._start_gang(spec), self._condition)
            except (HostUnreachable, SliceLost) as error:
                watch.view.hosts[0].lost = str(error)
                watch.view.cloud = await condition_after_trouble(self._condition, self._clock)
                return await self._conclude(spec, watch.view)
        return await self._conclude(spec, await watch.until_ended())

    async def _start_gang(self, spec: GangSpec) -> None:
        async with self._hosts() as group:
            await start_gang(group, spec)

    async def wait_for_commit(self, step: int) -> None:
        """Wait until a checkpoint of `step` counts; for the last step, until the gang has ended well, too.

        Raises:
            AttemptEnded: the gang ended before.
            tpu.runs.controller.ControllerLost: another process drives the run now.
        """
        assert self._attempt_task is not None
        assert self._watch is not None
        last = step == self.record.config.steps
        watched = {self._attempt_task} | ({self._interruption} if self._interruption else set())
        while last or self._watch.view.committed < step:
            await asyncio.wait(watched, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            await self._still_wanted()
            if self._attempt_task.done():
                verdict = self._attempt_task.result()
                self._attempt_task = self._spec = None
                if await self.committed(step):
                    return
                raise self._ended(verdict)

    def _ended(self, verdict: Verdict) -> AttemptEnded:
        kinds = [VerdictKind(e.detail["verdict"]) for e in self.log.events if e.kind == "attempt-ended"]
        budget = self.record.config.budget
        answer = allows(Budgets(budget.preemption, budget.infrastructure, budget.user_failure), kinds)
        if verdict.kind is VerdictKind.CANCELLED or verdict.final:
            return AttemptEnded(verdict, False, f"{verdict.kind.value}: {verdict.reason}")
        if isinstance(answer, Exhausted):
            return AttemptEnded(verdict, False, f"{verdict.kind.value}: {verdict.reason} ({answer.reason})")
        return AttemptEnded(verdict, True, f"{verdict.kind.value}: {verdict.reason}")

    async def back_off(self) -> None:
        """Wait before another attempt, longer each time the same verdict came in a row."""
        kinds = [VerdictKind(e.detail["verdict"]) for e in self.log.events if e.kind == "attempt-ended"]
        if (seconds := back_off_s(kinds)) > 0:
            self.report(f"waiting {seconds:.0f} s before the next attempt")
            await self._pause(seconds)

    async def _conclude(self, spec: GangSpec, view: GangView, stopped: str | None = None) -> Verdict:
        """End what is left of a gang, close its attempt, and write down why it ended."""
        assert self._slice is not None
        self._concluding = True
        last_step = self.record.config.steps if self.record.config.commits else None
        found = launch.evidence(view, last_step, stopped)
        give_up = self._clock.monotonic() + CLOUD_WORD_S
        while needs_the_cloud(found) and self._clock.monotonic() < give_up:
            await self._clock.sleep(1.0)
            view.cloud = await self._condition()
            found = launch.evidence(view, last_step, stopped)
        verdict = give_verdict(found)
        await self.may_act()
        name = self._slice.name
        ended = self._clock.time()
        told_to_save = stopped is not None or any(host.noticed for host in view.hosts)
        grace_s = self.record.config.grace_seconds if told_to_save else FALLEN_GRACE_S
        gone = view.finished or await self._end(spec, view, grace_s)
        fence = await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
        last = fence.closed.get(spec.attempt)
        reached = last.step if last else _resumed_at(fence, spec.attempt)
        await self.note(
            "attempt-ended", attempt=spec.attempt, slice=name, verdict=verdict.kind.value, reason=verdict.reason,
            evidence=list(verdict.evidence), last_commit=last.step if last else None, phases=view.phases, ended=ended,
            resume=view.resumed or 0, reached=view.step, steps=self.record.config.steps,
            waste_from=waste_begins(view.steps, reached, ended),
        )  # fmt: skip
        self.report(f"attempt {spec.attempt} ended: {verdict.kind.value}, {verdict.reason}; last commit "
                    + (f"step {last.step}" if last else "none"))  # fmt: skip
        if not gone or not verdict.slice_usable:
            await self.delete(
                name, verdict.reason if not verdict.slice_usable else "its gang could not be confirmed dead"
            )
        return verdict

    async def _end(self, spec: GangSpec, view: GangView, grace_s: float) -> bool:
        """End the gang on every host that can be reached; True if all are confirmed dead."""
        assert self._slice is not None
        if view.cloud is not None and view.cloud.condition is Condition.LOST:
            return False
        reachable = tuple(host.address for host in view.hosts if host.lost is None)
        if not reachable:
            return False
        try:
            async with connect_all(reachable, self._identity, self._connection, 10.0, self.report) as group:
                confirmed = await end_gang(group, spec, grace_s)
        except HostUnreachable:
            return False
        return confirmed and len(reachable) == len(view.hosts)

    @contextlib.asynccontextmanager
    async def waiting_for_evaluation(self) -> AsyncIterator[None]:
        """Around a wait for evaluations when nothing trains any more."""
        await self.note("evaluation-wait-started")
        yield
        await self.note("evaluation-wait-done")

    # --- taking up and leaving --------------------------------------------------------------------------------

    async def take_up(self, to_end: bool = False) -> None:
        """Find what an earlier driver left: its slices, and a gang that still trains.

        `to_end`: a slice without a gang is of no use any more, and is not waited for.
        """
        fence = await self.fence()
        started = {e.detail["attempt"]: e.detail for e in self.log.events if e.kind == "attempt-started"}
        ended = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-ended"}
        running = started.get(fence.attempt) if fence.open and fence.attempt not in ended else None
        for name in self.slices_not_deleted():
            view = await self._left_behind(name)
            wanted = (running is not None and running["slice"] == name) or (
                running is None and self._slice is None and not to_end
            )
            if view.condition is not Condition.LOST and wanted:
                self._slice = await self._find_again(name)
        if running is not None:
            await self._take_up_gang(fence, running)
        for name in self.slices_not_deleted():
            if self._slice is None or self._slice.name != name:
                await self.delete(name, "left by an earlier driver")

    async def _find_again(self, name: str) -> ReadySlice | None:
        """The slice that an earlier driver asked for, once it is ready; None if it is lost meanwhile.

        A gang may be training on it, so a cloud that does not answer is waited for.

        Raises:
            CloudError: it was not ready in time, or the cloud refuses for good.
        """
        request = launch.slice_request(self.record.config, self._connection, self._identity)
        end = self._clock.monotonic() + request.deadline_s
        while True:
            try:
                found = await provision(
                    self._cloud, request, name, self._clock, self.report, self._still_wanted, keep=True
                )
                break
            except CloudError as error:
                if (await self._left_behind(name)).lost:
                    return None
                if not error.retryable or self._clock.monotonic() > end:
                    raise
                self.report(f"cannot take {name} up yet, trying again: {error}")
            await self._pause(CLOUD_POLL_S)
        if not self._was_ready(name):
            await self.note("slice-ready", slice=name)
        return found

    def _was_ready(self, name: str) -> bool:
        return any(e.kind == "slice-ready" and e.detail["slice"] == name for e in self.log.events)

    async def _left_behind(self, name: str) -> LifeView:
        """What the cloud says of a slice that an earlier driver asked for: it may still be on its way."""
        wanted = self.record.config.slice
        return await slice_condition(
            self._cloud,
            wanted.zone,
            name,
            spot=wanted.provisioning == "spot",
            was_ready=self._was_ready(name),
        )

    async def _take_up_gang(self, fence: Fence, running: dict[str, Any]) -> None:
        number = fence.attempt
        if self._slice is None or self._slice.name != running["slice"]:
            # Its slice is gone, and so is every process of it.
            await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
            await self._note_attempt_without_gang(
                number, running["slice"], VerdictKind.PREEMPTED, "its slice was lost while nobody watched"
            )
            return
        # Of the specification only run and attempt matter to a gang that runs already.
        spec = GangSpec(self.record.config.name, number)
        confirmed = True
        try:
            async with self._hosts(TAKE_UP_S) as group:
                statuses = await gang_status(group, spec)
                reason = next(filter(None, map(launch.why_not_taken_up, statuses)), None)
                if reason is not None:
                    confirmed = await end_gang(group, spec, self.record.config.grace_seconds)
        except HostUnreachable as error:
            statuses, reason, confirmed = [], str(error), False
        if reason is None:
            self.report(f"taking up attempt {number} on {self._slice.name}")
            ended_by_us = {status.host for status in statuses if status.ended}
            self._follow(spec, fence.newest(), start=False, ended_by_us=ended_by_us)
            return
        name, view = self._slice.name, await self._condition()
        lost = view.condition is Condition.LOST
        await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
        await self._note_attempt_without_gang(
            number,
            name,
            VerdictKind.PREEMPTED if lost and view.preempted else VerdictKind.INFRASTRUCTURE,
            view.reason if lost else reason,
        )
        if lost or not confirmed:
            await self.delete(name, view.reason if lost else reason)

    async def _note_attempt_without_gang(
        self, number: int | None, name: str, kind: VerdictKind, reason: str
    ) -> None:
        last: Commit | None = (await self.fence()).closed.get(number) if number is not None else None
        await self.note(
            "attempt-ended", attempt=number, slice=name, verdict=kind.value, reason=reason, evidence=[],
            last_commit=last.step if last else None, phases=[], ended=self._clock.time(), reached=None,
            steps=self.record.config.steps, waste_from=None,
        )  # fmt: skip

    async def stop(self, why: str) -> None:
        """End the gang if there is one, giving it time for a checkpoint."""
        if self._attempt_task is None or self._watch is None or self._spec is None:
            return
        spec, watch, task = self._spec, self._watch, self._attempt_task
        self._attempt_task = self._spec = None
        if task.done():
            return
        self.report(f"ending attempt {spec.attempt}: {why}")
        if self._concluding:  # it ends by itself, and why is about to be written down
            await task
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        await self._conclude(spec, watch.view, stopped=why)

    async def clean_up(self, why: str) -> None:
        """End the gang and delete every slice of the run; returns once the cloud confirms."""
        await self.may_act()
        await self.stop(why)
        for name in self.slices_not_deleted():
            await self.delete(name, why)
        await self._close_attempt_without_gang(why)

    async def _close_attempt_without_gang(self, why: str) -> None:
        """Close an attempt that nobody followed; with its slice its gang is gone."""
        fence = await self.fence()
        ended = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-ended"}
        for event in self.log.events:
            if event.kind == "attempt-started" and event.detail["attempt"] not in ended and fence.open:
                await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
                await self._note_attempt_without_gang(
                    event.detail["attempt"], event.detail["slice"], VerdictKind.CANCELLED, f"stopped: {why}"
                )


def _resumed_at(fence: Fence, attempt: int) -> int:
    """Step of the newest commit that an attempt could start from."""
    return max((c.step for c in fence.commits if c.attempt < attempt), default=0)
