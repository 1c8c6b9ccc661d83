"""Carry one run to its end: start a gang on a slice, wait for commits, and say why an attempt ended.

Everything the driver knows stands in the bucket (record, fence, events, controller), so a driver that dies at any
moment is replaced by another one that reads it. It checks its right to act before each creation, deletion and kill.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from tpu.checkpoint.fence import Commit, Fence, close_attempt, load_fence, open_attempt, update_fence
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import HostUnreachable
from tpu.hosts.gang import GangSpec, end_gang, gang_status, start_gang
from tpu.runs import launch
from tpu.runs.blaming import avoided, weigh
from tpu.runs.charges import charged
from tpu.runs.context import RunContext
from tpu.runs.event_log import RunEvent, given_up, in_repair, undeleted
from tpu.runs.eviction import Eviction
from tpu.runs.goodput import waste_begins
from tpu.runs.lanes import Ending, Lanes, resumed_at
from tpu.runs.overview import reached
from tpu.runs.parts import Part
from tpu.runs.record import RunRecord
from tpu.runs.slice_holder import SliceHolder
from tpu.runs.sync import Installed, SyncError
from tpu.runs.trouble import CLOUD_WORD_S, SliceLost, condition_after_trouble, unless_lost
from tpu.runs.watch import GangView, GangWatch, Listener
from tpu.slices.budget import Budgets, Exhausted, allows, back_off_s
from tpu.slices.condition import Condition
from tpu.slices.names import hosts_in_short
from tpu.slices.provision import ReadySlice
from tpu.slices.verdict import Verdict, VerdictKind, give_verdict, needs_the_cloud

# The hosts of a gang that runs have been up already.
TAKE_UP_S = 30.0
# Those that have just been given the code, too; an SSH server that was killed is back within seconds.
START_REACH_S = 15.0
# Those of a gang that is ended: the others of it have been heard a moment ago.
END_REACH_S = 10.0
# What a gang that has fallen apart gets from SIGTERM to SIGKILL: no checkpoint can come of it any more.
FALLEN_GRACE_S = 1.0
NOT_CONFIRMED_DEAD = "its gang could not be confirmed dead"
# A commit is looked for this often; the end of an attempt wakes at once.
LOOK_S = 0.2


class AttemptEnded(RuntimeError):
    """An attempt ended before the step that was waited for; `retry` says whether another one follows.

    `exhausted` is True if only the budget forbids it.
    """

    def __init__(self, verdict: Verdict, retry: bool, message: str, exhausted: bool = False) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.retry = retry
        self.exhausted = exhausted


def attempt_ended(record: RunRecord, events: Sequence[RunEvent], verdict: Verdict) -> AttemptEnded:
    """What follows from the verdict on a run's last attempt: another one, if its budgets allow that."""
    kinds = charged(record, events)
    budget = record.config.budget
    answer = allows(Budgets(budget.preemption, budget.infrastructure, budget.user_failure), kinds)
    if verdict.kind is VerdictKind.CANCELLED or verdict.final:
        return AttemptEnded(verdict, False, f"{verdict.kind.value}: {verdict.reason}")
    if isinstance(answer, Exhausted):
        told = f"{verdict.kind.value}: {verdict.reason} ({answer.reason})"
        return AttemptEnded(verdict, False, told, exhausted=verdict.kind is not VerdictKind.FINISHED)
    return AttemptEnded(verdict, True, f"{verdict.kind.value}: {verdict.reason}")


class RunDriver:
    """Acts for one run while its controller holds the right to.

    That of a pack has the `lanes` of the runs that it trains: their attempts begin and end with its own. That of a
    slice's `part` takes part in another run, which has the checkpoints.
    """

    def __init__(
        self,
        run: RunContext,
        slices: SliceHolder,
        secrets: dict[str, str],
        listener: Listener,
        lanes: Lanes | None = None,
        part: Part | None = None,
    ) -> None:
        self.record = run.record
        self.run_dir = run.run_dir
        self.log = run.log
        self.report = run.report
        self._run = run
        self._slices = slices
        self._secrets = secrets
        self._listener = listener
        self._lanes = lanes
        self._part = part
        self._watch: GangWatch | None = None
        self._spec: GangSpec | None = None
        self._attempt_task: asyncio.Task[Verdict] | None = None
        self._concluding = False
        self._in_repair = False  # the slice at hand comes back by itself, and is waited for

    async def leave(self) -> None:
        """Stop following and beating, and give the right back. The gang goes on if there is one."""
        if self._attempt_task is not None:
            self._attempt_task.cancel()
            # What it ended with is seen anew by whoever takes the run up.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._attempt_task
        await self._slices.leave()
        await self._run.tenure.leave()

    async def provision(self) -> ReadySlice:
        """A ready slice, the one at hand or a new one. Raises as SliceHolder.provision."""
        await self._run.tenure.still_wanted()
        if self._in_repair:
            await self._take_back()
        return await self._slices.provision(
            lambda name, reason: self._note_attempt_without_gang(
                None, name, VerdictKind.PREEMPTED, reason, True
            )
        )

    async def _take_back(self) -> None:
        """Have the slice again after its repair, once the last gang is confirmed dead on it."""
        self._in_repair = False
        attempt = (await self.fence()).attempt
        if not await self._slices.until_repaired() or not attempt:
            return
        async with self._slices.hosts() as group:
            dead = await end_gang(group, GangSpec(self.record.config.name, attempt), FALLEN_GRACE_S)
        if not dead and self._slices.slice is not None:
            await self._slices.delete(self._slices.slice.name, NOT_CONFIRMED_DEAD)

    async def sync(self) -> Installed:
        """Code and environment on the slice. Raises as SliceHolder.sync."""
        return await self._slices.sync()

    async def fence(self) -> Fence:
        return await asyncio.to_thread(load_fence, self.run_dir)

    async def committed(self, step: int) -> bool:
        """Whether a checkpoint of `step` or later counts; for a foreign command, whether it has ended well."""
        return reached(self.record, await self.fence(), self.log.events) >= step

    @property
    def attempt(self) -> int | None:
        """Number of the attempt whose gang lives, or None."""
        return self._spec.attempt if self._attempt_task is not None and self._spec is not None else None

    @property
    def view(self) -> GangView | None:
        return self._watch.view if self._watch is not None else None

    @contextlib.asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Around provisioning and sync: what fails there is judged by what the cloud says of the slice.

        Raises:
            AttemptEnded: a host could not be reached or refused the code.
        """
        try:
            yield
        except (HostUnreachable, SyncError, SliceLost) as error:
            assert self._slices.slice is not None
            name = self._slices.slice.name
            unreachable = error.reasons if isinstance(error, HostUnreachable) else ()
            all_lost = len(unreachable) == len(self._slices.slice.hosts)
            view = await condition_after_trouble(self._slices.condition, self._run.clock, all_lost)
            if view.lost:
                kind = VerdictKind.PREEMPTED if view.preempted else VerdictKind.INFRASTRUCTURE
                reason = f"{view.reason}, before the gang had started"
            elif isinstance(error, SyncError) and view.usable:
                kind, reason = VerdictKind.USER_FAILURE, str(error)
            else:
                kind, reason = VerdictKind.INFRASTRUCTURE, str(error)
            self._in_repair = view.condition is Condition.RECOVERING
            give_up = kind is not VerdictKind.USER_FAILURE and not self._in_repair
            await self._note_attempt_without_gang(None, name, kind, reason, give_up)
            if give_up:
                await self._slices.delete(name, reason)
            raise self._ended(Verdict(kind, reason)) from error

    async def start_attempt(self) -> int:
        """Open the next attempt and start its gang; returns its number."""
        assert self._slices.slice is not None
        assert self._slices.installed is not None
        await self._run.tenure.check()
        tenant = await self._slices.hold_on()
        number = (await self.fence()).attempt + 1
        fence = await asyncio.to_thread(update_fence, self.run_dir, lambda f: open_attempt(f, number))
        newest = fence.newest()
        await self.log.note(
            "attempt-started", attempt=number, slice=self._slices.slice.name,
            resume=newest.step if newest else None, code=self.record.code["sha256"],
        )  # fmt: skip
        # Of a foreign command neither steps nor checkpoints are known.
        start = f" from step {newest.step if newest else 0}" if self.record.config.commits else ""
        self.report(f"attempt {number} starts on {self._slices.slice.name}{start}")
        members = await self._lanes.open(self._slices.slice.name) if self._lanes is not None else ()
        spec = launch.gang_spec(
            self.record,
            self.run_dir,
            number,
            newest,
            self._slices.slice,
            tenant,
            self._slices.installed,
            self._secrets,
            members,
            self._part,
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
        assert self._slices.slice is not None
        self._spec, self._concluding = spec, False
        eviction = Eviction()
        self._watch = GangWatch(
            self._slices.slice.hosts, spec, self._run.connection, self._run.identity, self._slices.word,
            self._run.clock, self._listener, self.record.config.progress_minutes * 60, self._slices.save_at(),
            lambda committed: self._slices.why_leave(committed, eviction), self.record.config.steps,
            output_counts=not self.record.config.commits,
        )  # fmt: skip
        for host in self._watch.view.hosts:
            host.ended_by_us = host.address in ended_by_us
        if newest is not None:
            self._watch.view.committed = newest.step
        self._attempt_task = asyncio.create_task(self._attempt(spec, self._watch, start))

    async def _attempt(self, spec: GangSpec, watch: GangWatch, start: bool) -> Verdict:
        if start:
            try:
                await unless_lost(self._start_gang(spec), self._slices.condition)
            except (HostUnreachable, SliceLost) as error:
                with contextlib.suppress(
                    SliceLost
                ):  # hosts refuse what comes by an older lease: is ours lost?
                    await self._slices.hold_on()
                watch.view.hosts[0].lost = str(error)
                watch.view.cloud = await condition_after_trouble(self._slices.condition, self._run.clock)
                return await self._conclude(spec, watch.view)
        return await self._conclude(spec, await watch.until_ended())

    async def _start_gang(self, spec: GangSpec) -> None:
        async with self._slices.hosts(START_REACH_S) as group:
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
        while last or self._watch.view.committed < step:
            await self._look_after_attempt()
            if self._attempt_task.done():
                verdict = self._attempt_task.result()
                self._attempt_task = self._spec = None
                if await self.committed(step):
                    return
                raise self._ended(verdict)

    async def wait_for_end(self) -> None:
        """Wait until the gang of a pack has ended well: then each of its runs has, somehow.

        Raises:
            AttemptEnded: it ended otherwise.
            tpu.runs.controller.ControllerLost: another process drives the pack now.
        """
        assert self._attempt_task is not None
        while not self._attempt_task.done():
            await self._look_after_attempt()
        verdict = self._attempt_task.result()
        self._attempt_task = self._spec = None
        if verdict.kind is not VerdictKind.FINISHED:
            raise self._ended(verdict)

    async def _look_after_attempt(self) -> None:
        """Wait for a moment, but no longer than the gang lives and the run is wanted and ours."""
        assert self._attempt_task is not None
        watched = {self._attempt_task} | (
            {self._run.tenure.interruption} if self._run.tenure.interruption else set()
        )
        await asyncio.wait(watched, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        await self._run.tenure.still_wanted()

    def _ended(self, verdict: Verdict) -> AttemptEnded:
        return attempt_ended(self.record, self.log.events, verdict)

    def set_priority(self, priority: int) -> None:
        """The run's priority in its pool from now on, also of what it holds already."""
        self._run.member.set_priority(priority)

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than the run is wanted and ours."""
        await self._run.tenure.pause(seconds)

    async def back_off(self) -> None:
        """Wait before another attempt, longer each time the same verdict came in a row."""
        kinds = charged(self.record, self.log.events)
        if (seconds := back_off_s(kinds)) > 0:
            self.report(f"waiting {seconds:.0f} s before the next attempt")
            await self.log.note("back-off", seconds=seconds)
            await self._run.tenure.pause(seconds)

    async def _conclude(
        self, spec: GangSpec, view: GangView, stopped: str | None = None, save: bool = True
    ) -> Verdict:
        """End what is left of a gang, close its attempt, and write down why it ended."""
        assert self._slices.slice is not None
        self._concluding = True
        if not view.finished:
            view.evicted = view.evicted or await self._slices.lease_lost()
        last_step = self.record.config.steps if self.record.config.commits else None
        found = launch.evidence(view, last_step, stopped)
        end = self._run.clock.monotonic() + CLOUD_WORD_S
        while needs_the_cloud(found) and self._run.clock.monotonic() < end:
            await self._run.clock.sleep(1.0)
            view.cloud = await self._slices.condition()
            found = launch.evidence(view, last_step, stopped)
        verdict = give_verdict(found)
        await self._run.tenure.check()
        name = self._slices.slice.name
        ended = self._run.clock.time()
        told_to_save = (stopped and save) or view.told_to_leave or any(host.noticed for host in view.hosts)
        grace_s = self.record.config.grace_seconds if told_to_save else FALLEN_GRACE_S
        gone = view.finished or await self._end(spec, view, grace_s)
        give_up = not verdict.slice_recovers and not (gone and verdict.slice_usable and view.bad is None)
        if (
            self._lanes is not None
        ):  # before its own end is noted: who takes it up after that looks at none of them
            await self._lanes.close(
                Ending(verdict, name, ended, evicted=view.evicted is not None, slice_given_up=give_up), view
            )
        fence = await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
        last = fence.closed.get(spec.attempt)
        reached = last.step if last else resumed_at(fence, spec.attempt)
        if self._part is not None:
            reached = await self._kept(self._part, view)
        await self.log.note(
            "attempt-ended", attempt=spec.attempt, slice=name, verdict=verdict.kind.value, reason=verdict.reason,
            evidence=list(verdict.evidence), last_commit=last.step if last else None, phases=view.phases, ended=ended,
            resume=view.resumed or 0, reached=view.step, steps=self.record.config.steps,
            waste_from=waste_begins(view.steps, reached), commits=view.commits, evicted=view.evicted is not None,
            slice_given_up=give_up,
        )  # fmt: skip
        told = f"attempt {spec.attempt} ended: {verdict.kind.value}, {hosts_in_short(verdict.reason, name)}"
        if self.record.config.commits:
            told += f"; last commit {f'step {last.step}' if last else 'none'}"
        self.report(told)
        await self._slices.note_egress(spec.attempt)
        doubt = await weigh(self.record, self.log, self._slices.quarantine)
        self._in_repair = verdict.slice_recovers
        if self._in_repair:
            return verdict
        if give_up:
            why = verdict.reason if view.bad is None else view.bad
            await self._slices.delete(name, NOT_CONFIRMED_DEAD if verdict.slice_usable and not gone else why)
        elif view.evicted is not None:
            await self._slices.part_with(verdict.reason)
        elif doubt is not None and doubt.proven:
            await self._slices.delete(name, doubt.why)
        elif doubt is not None and not verdict.final:
            self._slices.avoid(name)
            await self._slices.part_with(doubt.why)
        return verdict

    async def _kept(self, part: Part, view: GangView) -> int:
        """The step up to which nothing is lost: others have what this slice had, or it is committed."""
        if part.others():
            return view.step
        newest = (await asyncio.to_thread(load_fence, part.run_dir)).newest()
        return newest.step if newest else 0

    async def _end(self, spec: GangSpec, view: GangView, grace_s: float) -> bool:
        """End the gang on every host that can be reached; True if all are confirmed dead."""
        assert self._slices.slice is not None
        if view.cloud is not None and view.cloud.condition is Condition.LOST:
            return False
        reachable = tuple(host.address for host in view.hosts if host.lost is None)
        if not reachable:
            return False
        try:
            async with self._run.connect(reachable, END_REACH_S) as group:
                confirmed = await end_gang(group, spec, grace_s)
        except HostUnreachable:
            return False
        return confirmed and len(reachable) == len(view.hosts)

    @contextlib.asynccontextmanager
    async def waiting_for_evaluation(self) -> AsyncIterator[None]:
        """Around a wait for evaluations when nothing trains any more."""
        await self.log.note("evaluation-wait-started")
        yield
        await self.log.note("evaluation-wait-done")

    async def take_up(self, to_end: bool = False) -> None:
        """Find what an earlier driver left: its slices, and a gang that still trains.

        `to_end`: a slice without a gang is of no use any more, and is not waited for.
        """
        fence = await self.fence()
        started = {e.detail["attempt"]: e.detail for e in self.log.events if e.kind == "attempt-started"}
        ended = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-ended"}
        running = started.get(fence.attempt) if fence.open and fence.attempt not in ended else None
        left = [(name, await self._slices.left_behind(name)) for name in undeleted(self.log.events)]
        # Of those that raced for the run the one that is ready is taken.
        for name, view in sorted(left, key=lambda one: not one[1].usable):
            # What the last driver had given up is no better now, unless it is being repaired.
            left_for_good = given_up(self.log.events, name) or name in avoided(self.log.events)
            unfit = left_for_good and view.condition is not Condition.RECOVERING
            trains = running is not None and running["slice"] == name
            free = running is None and self._slices.slice is None and not unfit and not to_end
            if view.condition is not Condition.LOST and (trains or free):
                self._slices.slice = await self._slices.find_again(name)
                self._in_repair = running is None and in_repair(self.log.events, name)
        if running is not None:
            await self._take_up_gang(fence, running)
        for name in undeleted(self.log.events):
            if self._slices.slice is None or self._slices.slice.name != name:
                await self._slices.delete(name, "left by an earlier driver")

    async def _take_up_gang(self, fence: Fence, running: dict[str, Any]) -> None:
        number = fence.attempt
        if self._slices.slice is None or self._slices.slice.name != running["slice"]:
            # Its slice is gone, and so is every process of it.
            await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
            if (
                pack := running.get("pack")
            ) is not None:  # the gang is the pack's, which was looked after before
                why = f"its pack {pack} does not train it any more"
                await self._note_attempt_without_gang(
                    number, running["slice"], VerdictKind.CANCELLED, why, False, had_slice=False
                )
                return
            why = self._slices.why_lost(running["slice"]) or "its slice was lost while nobody watched"
            await self._note_attempt_without_gang(number, running["slice"], VerdictKind.PREEMPTED, why, True)
            return
        # Of the specification only run and attempt matter to a gang that runs already.
        spec = GangSpec(self.record.config.name, number)
        confirmed = True
        try:
            async with self._slices.hosts(TAKE_UP_S) as group:
                statuses = await gang_status(group, spec)
                reason = next(filter(None, map(launch.why_not_taken_up, statuses)), None)
                if reason is not None:
                    confirmed = await end_gang(group, spec, self.record.config.grace_seconds)
        except HostUnreachable as error:
            statuses, reason, confirmed = [], str(error), False
        if reason is None:
            self.report(f"taking up attempt {number} on {self._slices.slice.name}")
            ended_by_us = {status.host for status in statuses if status.ended}
            self._follow(spec, fence.newest(), start=False, ended_by_us=ended_by_us)
            return
        name, view = self._slices.slice.name, await self._slices.condition()
        lost = view.condition is Condition.LOST
        await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
        await self._note_attempt_without_gang(
            number,
            name,
            VerdictKind.PREEMPTED if lost and view.preempted else VerdictKind.INFRASTRUCTURE,
            view.reason if lost else reason,
            give_up=lost or not confirmed,
        )
        if lost or not confirmed:
            await self._slices.delete(name, view.reason if lost else reason)

    async def _note_attempt_without_gang(
        self,
        number: int | None,
        name: str,
        kind: VerdictKind,
        reason: str,
        give_up: bool,
        had_slice: bool = True,
    ) -> None:
        if self._lanes is not None and number is not None:
            evicted = self._slices.why_lost(name) is not None
            end = Ending(Verdict(kind, reason), name, self._run.clock.time(), evicted, give_up)
            await self._lanes.close(end, None)
        last: Commit | None = (await self.fence()).closed.get(number) if number is not None else None
        await self.log.note(
            "attempt-ended", attempt=number, slice=name, verdict=kind.value, reason=reason, evidence=[],
            last_commit=last.step if last else None, phases=[], ended=self._run.clock.time(), reached=None,
            steps=self.record.config.steps, waste_from=None, evicted=self._slices.why_lost(name) is not None,
            slice_given_up=give_up,
        )  # fmt: skip
        if number is not None and had_slice:
            await self._slices.note_egress(number)

    async def stop(self, why: str, save: bool = True) -> None:
        """End the gang if there is one, giving it time for a checkpoint; without `save` its newest commit stays so."""
        if self._attempt_task is None or self._watch is None or self._spec is None:
            return
        spec, watch, task = self._spec, self._watch, self._attempt_task
        self._attempt_task = self._spec = None
        # Cancelled is not ended: a worker that dies cancels everything in its flows, this task too, and the gang lives.
        if task.done() and not task.cancelled():
            return
        self.report(f"ending attempt {spec.attempt}: {why}")
        if self._concluding and not task.done():  # it ends by itself, and why is about to be written down
            await task
            return
        task.cancel()
        with contextlib.suppress(
            asyncio.CancelledError, Exception
        ):  # the gang's end is looked at below, whatever broke
            await task
        if not save:  # what it would still commit while it ends does not count
            await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
        await self._conclude(spec, watch.view, stopped=why, save=save)

    async def clean_up(self, why: str, keep: bool = False, save: bool = True) -> None:
        """End the gang and delete every slice of the run; returns once the cloud confirms.

        `keep` says that somebody takes the slice at hand next: it is given back to its pool, if it is well. `save` is
        as for `stop`.
        """
        await self._run.tenure.check()
        await self.stop(why, save)
        if self._slices.slice is not None:
            await self._slices.part_with(why, keep)
        await self._slices.settle()
        for name in undeleted(self.log.events):
            await self._slices.delete(name, why)
        await self._close_attempt_without_gang(why)

    async def _close_attempt_without_gang(self, why: str) -> None:
        """Close an attempt that nobody followed; with its slice its gang is gone."""
        fence = await self.fence()
        ended = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-ended"}
        for event in self.log.events:
            if event.kind == "attempt-started" and event.detail["attempt"] not in ended and fence.open:
                await asyncio.to_thread(update_fence, self.run_dir, close_attempt)
                await self._note_attempt_without_gang(
                    event.detail["attempt"],
                    event.detail["slice"],
                    VerdictKind.CANCELLED,
                    f"stopped: {why}",
                    True,
                )
