"""Carry one trial: its run is opened, trained to its end and cleaned up, and what is heard of it goes to the board."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.runs.carrying import carry
from tpu.runs.config import RunConfig
from tpu.runs.controller import ControllerLost, Owner
from tpu.runs.driver import RunDriver
from tpu.runs.event_log import RunEvent, undeleted
from tpu.runs.opening import Shared, open_run
from tpu.sweeps.board import Live
from tpu.sweeps.course import TrialPruned
from tpu.sweeps.hearing import Hearing
from tpu.sweeps.queue import Running
from tpu.sweeps.trial import trial_run
from tpu.unbroken import unbroken

CLEAN_UP_TRIES, CLEAN_UP_AGAIN_S = 4, 10.0


@dataclass(frozen=True)
class Crew:
    """What all trials of a sweep have in common."""

    connection: Connection
    owner: Owner
    secrets: dict[str, str]
    shared: Shared
    clock: Clock
    folder: Path
    report: Callable[[str], None]
    wandb_key: str | None = None
    # Evaluations of this machine, each a process with threads of its own: not one a trial that ends.
    evaluators: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 2))
    )


async def clean_up(driver: RunDriver, crew: Crew, why: str, keep: bool, save: bool) -> None:
    """RunDriver.clean_up, tried again if cloud or bucket do not answer."""
    for left in reversed(range(CLEAN_UP_TRIES)):
        try:
            return await driver.clean_up(why, keep, save)
        except (CloudError, StorageUnavailable) as error:
            if not left or (isinstance(error, CloudError) and not error.retryable):
                raise
            driver.report(f"cleaning up once more: {error}")
            await crew.clock.sleep(CLEAN_UP_AGAIN_S)


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
