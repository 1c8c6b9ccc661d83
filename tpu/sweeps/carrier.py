"""Carry one trial: its run is opened, trained to its end and cleaned up, and what is heard of it goes to the board."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tpu.hosts.address import HostAddress
from tpu.runs.carrying import carry
from tpu.runs.config import RunConfig
from tpu.runs.controller import ControllerLost
from tpu.runs.crew import Crew, clean_up
from tpu.runs.event_log import RunEvent, undeleted
from tpu.runs.opening import open_run
from tpu.sweeps.board import Live
from tpu.sweeps.course import TrialPruned
from tpu.sweeps.hearing import Hearing
from tpu.sweeps.queue import Running
from tpu.sweeps.trial import trial_run
from tpu.unbroken import unbroken


def note_placed(live: Live, events: Sequence[RunEvent]) -> None:
    """Whether there are chips by the history of the run that holds them, which is the trial's own or its pack's."""
    live.placed = bool(undeleted(events))


class Carries(Protocol):
    """Trains one trial: alone, or in a pack."""

    async def carry(self) -> None:
        """Return when the run has reached its last step. Raises whatever ended it before, once that is settled."""
        ...


class Carrier:
    """Trains one trial, as often as it is preempted. Neither another trial nor a preemption of one touches it.

    `base` is the run of the sweep.
    """

    def __init__(
        self, base: RunConfig, metric: str, running: Running, hands_on: Callable[[], bool], crew: Crew
    ) -> None:
        self._base = base
        self._trial = running.trial
        self._hearing = Hearing(metric, running.live, running.course, base.commits)
        self._live = running.live
        self._course = running.course
        self._hands_on = hands_on
        self._crew = crew

    async def carry(self) -> None:
        """Return when the run has reached its last step.

        Raises:
            Whatever ended it before, after the run has been cleaned up; what its course was ended with is among it.
        """
        crew = self._crew
        config = trial_run(self._base, self._trial.parameters, self._trial.seed)
        async with open_run(
            config, crew.owner, secrets=crew.secrets, report=self._report, listener=self,
            connection=crew.connection, folder=crew.folder, clock=crew.clock, shared=crew.shared,
            told=lambda events: note_placed(self._live, events), wandb_key=crew.wandb_key,
        ) as driver:  # fmt: skip
            failure: BaseException | None = None
            try:
                self._course.borders = driver.record.segments[:-1] if config.commits else None
                await self._hearing.recall(driver.run_dir, await driver.fence(), driver.log.events)
                self._course.on_priority(driver.set_priority)
                await driver.take_up()
                await self._course.along(carry(driver))
            except ControllerLost:
                raise  # another process drives the run now: nothing here may be cleaned up
            except BaseException as error:
                failure = error
            why = "training is done" if failure is None else str(failure) or type(failure).__name__
            keep = not isinstance(failure, asyncio.CancelledError) and self._hands_on()
            save = not isinstance(failure, TrialPruned)
            await unbroken(clean_up(driver, crew, why, keep, save))
            if config.tracking.wanted:
                self._live.free()
            if failure is not None:
                raise failure

    def _report(self, text: str) -> None:
        self._crew.report(f"{self._trial.run}: {text}")

    # --- what the gang says; what its program prints is in the bucket ---

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_end(self) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        if host.index == 0:
            self._hearing.hear(host.name, record)
