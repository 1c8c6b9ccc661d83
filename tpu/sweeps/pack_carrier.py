"""Carry the trials of one pack: one gang trains them all, and each is a run of its own that may end before the others.

A preemption ends the attempt of all that still train; they go on together from their own commits, each in its lane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from tpu.checkpoint.fence import load_fence
from tpu.hosts.address import HostAddress
from tpu.runs.carrying import attempt
from tpu.runs.code import Bundle
from tpu.runs.config import RunConfig
from tpu.runs.controller import ControllerLost
from tpu.runs.crew import Crew, clean_up
from tpu.runs.driver import RunDriver, attempt_ended
from tpu.runs.event_log import RunEvent
from tpu.runs.lanes import Ending, Lane, Lanes
from tpu.runs.ledger import holdings
from tpu.runs.opening import open_lane, open_run
from tpu.runs.overview import reached
from tpu.runs.record import RunNotFound, RunRecord, data_hash, renew_code, run_directory
from tpu.runs.shares import next_shares, paid_last, share_detail
from tpu.slices.verdict import Verdict, VerdictKind
from tpu.sweeps.carrier import note_placed
from tpu.sweeps.hearing import Hearing
from tpu.sweeps.packing import member_of, pack_name, pack_run
from tpu.sweeps.queue import Running
from tpu.sweeps.trial import Trial, trial_run
from tpu.unbroken import unbroken


class PackedTrial:
    """One trial of a pack, for whoever waits for its end."""

    def __init__(self, pack: PackCarrier, running: Running, metric: str) -> None:
        self.trial = running.trial
        self.course = running.course
        self.hearing = Hearing(metric, running.live, running.course, commits=True)
        self.over = asyncio.Event()
        self.failure: BaseException | None = None
        self.joined = 0.0
        self.leaving: asyncio.Task[None] | None = None
        self._pack = pack
        self.live = running.live
        self._lane: Lane | None = None
        self._open = AsyncExitStack()

    @property
    def lane(self) -> Lane:
        assert self._lane is not None
        return self._lane

    async def carry(self) -> None:
        """Return when the run has reached its last step.

        Raises:
            Whatever ended it before; what its course was ended with is among it.
        """
        await self._pack.until_over(self)
        if self.failure is not None:
            raise self.failure

    async def join(self, config: RunConfig, crew: Crew, changed: Callable[[], None]) -> None:
        """Become the one that acts for the run; `changed` hears when it is to end early. Raises as open_run."""

        def report(text: str) -> None:
            crew.report(f"{config.name}: {text}")

        self._lane = await self._open.enter_async_context(
            open_lane(
                config,
                crew.owner,
                report=report,
                connection=crew.connection,
                folder=crew.folder,
                clock=crew.clock,
                wandb_key=crew.wandb_key,
            )
        )
        if config.tracking.wanted:
            self._open.callback(self.live.free)
        self.joined = crew.clock.time()
        self.course.borders = self.lane.record.segments[:-1]
        fence = await asyncio.to_thread(load_fence, self.lane.run_dir)
        await self.hearing.recall(self.lane.run_dir, fence, self.lane.log.events)
        self.course.on_end(changed)
        if (interruption := self.lane.tenure.interruption) is not None:
            interruption.add_done_callback(lambda _: changed())

    @property
    def wish(self) -> BaseException | None:
        """Why it is to end before its last step; None if it is not."""
        if self.course.ended is not None:
            return self.course.ended
        interruption = self.lane.tenure.interruption
        return interruption.exception() if interruption is not None and interruption.done() else None

    def leave(self) -> asyncio.Task[None]:
        """Begin to leave the pack, and let those know who wait. What the trial ends with stands in `failure`."""
        self.leaving = self.leaving or asyncio.create_task(self._leave())
        return self.leaving

    async def _leave(self) -> None:
        try:
            await self._open.aclose()
        finally:
            self.over.set()


class PackCarrier:
    """Trains the `trials` of one pack, as often as it is preempted.

    `pack` has all trials of the pack by lane, also those that take no part any more. `newer` is code for those that are
    started again. The pack begins with the first trial that is carried; a cancellation of one is that of all.
    """

    def __init__(
        self,
        base: RunConfig,
        metric: str,
        batch: Sequence[Running],
        pack: Sequence[Trial],
        hands_on: Callable[[], bool],
        crew: Crew,
        newer: Bundle | None = None,
    ) -> None:
        self.trials = [PackedTrial(self, running, metric) for running in batch]
        self._base = base
        self._pack = pack
        self._hands_on = hands_on
        self._crew = crew
        self._newer = newer
        self._task: asyncio.Task[None] | None = None
        self._left: dict[str, PackedTrial] = {}  # those that are to be trained, by run
        self._last: list[
            PackedTrial
        ] = []  # those that ended last: they hear of it once the chip is given back
        self._lanes: Lanes | None = None
        self._training: set[str] | None = None  # whom the program trains; None if there is none
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    @property
    def name(self) -> str:
        assert self._pack[0].pack is not None
        return pack_name(self._base.name, self._pack[0].pack)

    async def until_over(self, trial: PackedTrial) -> None:
        """Wait until the trial takes no part any more, and all is as its `failure` says."""
        self._task = self._task or asyncio.create_task(self._carry())
        try:
            await trial.over.wait()
        except asyncio.CancelledError:
            self._task.cancel()
            await unbroken(asyncio.wait({self._task}))
            raise

    async def _carry(self) -> None:
        failure: BaseException | None = None
        try:
            await self._train()
        except BaseException as error:  # every trial that is not over ends by it
            failure = error
        for trial in self.trials:
            if trial.leaving is None and trial not in self._last:
                trial.failure = trial.failure or failure
        await asyncio.gather(*(trial.leave() for trial in self.trials), return_exceptions=True)

    async def _train(self) -> None:
        crew = self._crew
        run_dir = run_directory(crew.connection.bucket, self.name)
        if self._newer is not None:
            with contextlib.suppress(RunNotFound):  # it failed before there was one
                await asyncio.to_thread(renew_code, run_dir, self._newer)
        runs = [trial_run(self._base, one.parameters, one.seed) for one in self._pack]
        lanes = self._lanes = await self._join(runs)
        if not self._left:
            return
        async with open_run(
            pack_run(self._base, int(self.name[-4:]), runs), crew.owner, secrets=crew.secrets, report=self._report,
            listener=self, connection=crew.connection, folder=crew.folder, clock=crew.clock, shared=crew.shared,
            told=self._told, lanes=lanes,
        ) as driver:  # fmt: skip
            failure: BaseException | None = None
            try:
                for trial in self._left.values():
                    trial.course.on_priority(driver.set_priority)
                await driver.take_up()
                await self._until_none_is_left(driver)
            except ControllerLost:
                raise  # another process drives the pack now: nothing here may be cleaned up
            except BaseException as error:
                failure = error
            why = "its trials have ended" if failure is None else str(failure) or type(failure).__name__
            keep = not isinstance(failure, asyncio.CancelledError) and self._hands_on()
            # Without a failure nobody is left who could save.
            await unbroken(clean_up(driver, crew, why, keep, save=failure is not None))
            await unbroken(self._pay(driver, self._payers, crew.clock.time()))
            if failure is not None:
                raise failure

    async def _join(self, runs: Sequence[RunConfig]) -> Lanes:
        """Become the one that acts for each trial's run; one for which that fails ends alone."""
        crew, by_name = self._crew, {run.name: run for run in runs}
        joining = [trial.join(by_name[trial.trial.run], crew, self._wake) for trial in self.trials]
        joined = await asyncio.gather(*joining, return_exceptions=True)
        for trial, error in zip(self.trials, joined, strict=True):
            if error is None:
                self._left[trial.trial.run] = trial
            else:
                trial.failure = error
                trial.leave()
        members = []
        for run in runs:
            record = RunRecord(run, await asyncio.to_thread(data_hash, run), {}, 0.0)
            if (trial := self._left.get(run.name)) is not None:
                record = trial.lane.record
            members.append(member_of(record, run_directory(crew.connection.bucket, run.name)))
        lanes = Lanes(self.name, members)
        lanes.live |= {name: trial.lane for name, trial in self._left.items()}
        return lanes

    async def _until_none_is_left(self, driver: RunDriver) -> None:
        await self._look(driver)  # no chip is got for trials that are trained already
        attempts = asyncio.create_task(self._attempts(driver))
        try:
            while self._left and not attempts.done():
                self._changed.clear()
                await self._look(driver)
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({changed, attempts}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            if attempts.done():
                await self._look(
                    driver
                )  # whoever has come to its own end before has nothing to do with how it ended
            # A program whose runs have all come to an end exits by itself; one that trains for nobody is ended.
            if attempts.done() or self._training == set():
                await attempts
        finally:
            attempts.cancel()
            await asyncio.gather(attempts, return_exceptions=True)

    async def _attempts(self, driver: RunDriver) -> None:
        while self._left:
            await attempt(driver, driver.wait_for_end)
            await self._look(driver)

    async def _look(self, driver: RunDriver) -> None:
        """Part with every trial that has ended, somehow, and have the others pay for the chip."""
        assert self._lanes is not None
        async with self._looking:
            ended = [trial for trial in self._left.values() if await self._has_ended(trial, driver)]
            for trial in ended:
                del self._left[trial.trial.run], self._lanes.live[trial.trial.run]
            if not self._left:
                self._last += ended
            now = self._crew.clock.time()
            await self._pay(driver, self._payers, now)
            for trial in ended if self._left else ():
                await self._note_shares(driver, trial, 0, now)
                trial.leave()

    async def _has_ended(self, trial: PackedTrial, driver: RunDriver) -> bool:
        """Whether the trial takes no part any more; its attempt is closed then, and its `failure` says why."""
        lane, wish = trial.lane, trial.wish
        if isinstance(wish, ControllerLost):  # nothing of the run is ours any more
            trial.failure, lane.attempt = wish, None
            return True
        if lane.attempt is not None and (wish is not None or _by_itself(lane)):
            why = Verdict(VerdictKind.CANCELLED, f"stopped: {wish}")
            if wish is not None:
                lane.said = None
            await self._end(lane, why, driver)
        if lane.attempt is None and await self._is_complete(lane):
            return True
        if wish is not None:
            trial.failure = wish
            return True
        verdict = lane.verdict
        if lane.attempt is not None or verdict is None or verdict.kind is VerdictKind.CANCELLED:
            return False  # it trains, or the pack is stopped and says why itself
        lane.verdict = None
        ended = attempt_ended(lane.record, lane.log.events, verdict)
        trial.failure = None if ended.retry else ended
        return not ended.retry

    async def _is_complete(self, lane: Lane) -> bool:
        fence = await asyncio.to_thread(load_fence, lane.run_dir)
        return reached(lane.record, fence, ()) >= lane.record.config.steps

    async def _end(self, lane: Lane, verdict: Verdict, driver: RunDriver) -> None:
        assert self._lanes is not None
        started = next(e for e in reversed(lane.log.events) if e.kind == "attempt-started")
        ending = Ending(verdict, started.detail["slice"], self._crew.clock.time())
        await self._lanes.end(lane, ending, driver.view)

    # --- what it costs ---

    @property
    def _payers(self) -> list[PackedTrial]:
        """Those that train; of what comes behind the last step, those that ended last."""
        return [*self._last, *self._left.values()]

    async def _pay(self, driver: RunDriver, payers: Sequence[PackedTrial], now: float) -> None:
        for trial in payers:
            await self._note_shares(driver, trial, len(payers), now)

    async def _note_shares(self, driver: RunDriver, trial: PackedTrial, shared_by: int, now: float) -> None:
        log, held = trial.lane.log, holdings(driver.log.events, now)
        for share in next_shares(paid_last(log.events), held, shared_by, trial.joined, now):
            await log.note("share", **share_detail(share, driver.log.events))

    # --- what the gang says ---

    def _report(self, text: str) -> None:
        self._crew.report(f"{self.name}: {text}")

    def _told(self, events: Sequence[RunEvent]) -> None:
        for trial in self.trials:
            note_placed(trial.live, events)
        self._wake()

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_end(self) -> None:
        self._training = None

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        name, event = record.get("member"), record["event"]
        if name is None:
            return
        if event == "start":
            self._training = {*(self._training or ()), name}
        elif event == "ended" and self._training is not None:
            self._training -= {name}
        if (trial := self._left.get(name)) is None:
            return
        trial.hearing.hear(host.name, record)
        if event == "commit":
            trial.lane.tracker.committed()
        if event == "ended" and trial.lane.attempt is not None:
            trial.lane.said = record
            self._wake()


def _by_itself(lane: Lane) -> bool:
    """Whether the program says that the run has come to an end of its own, and not with the whole pack."""
    return lane.said is not None and lane.said["end"] != "left"
