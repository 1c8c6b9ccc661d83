"""Carry one trial: its run is opened, trained to its end and cleaned up, and what is heard of it goes to the board."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.runs.carrying import carry
from tpu.runs.config import RunConfig
from tpu.runs.controller import ControllerLost, Owner
from tpu.runs.driver import RunDriver
from tpu.runs.opening import Shared, open_run
from tpu.runtime.metrics import read_logged, read_metrics
from tpu.sweeps.board import Live
from tpu.sweeps.course import Course, TrialPruned
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


class Carrier:
    """Trains one trial, as often as it is preempted. Neither another trial nor a preemption of one touches it."""

    def __init__(
        self,
        config: RunConfig,
        metric: str,
        live: Live,
        course: Course,
        hands_on: Callable[[], bool],
        crew: Crew,
    ) -> None:
        self._config = config
        self._metric = metric
        self._live = live
        self._course = course
        self._hands_on = hands_on
        self._crew = crew
        # An attempt of a program without checkpoints of ours has begun and has logged nothing yet.
        self._begins = False

    async def carry(self) -> None:
        """Return when the run has reached its last step.

        Raises:
            Whatever ended it before, after the run has been cleaned up; what its course was ended with is among it.
        """
        crew = self._crew
        async with open_run(
            self._config, crew.owner, secrets=crew.secrets, report=self._report, listener=self,
            connection=crew.connection, folder=crew.folder, clock=crew.clock, shared=crew.shared,
        ) as driver:  # fmt: skip
            failure: BaseException | None = None
            try:
                self._course.borders = driver.record.segments[:-1] if self._config.commits else None
                await self._recall(driver)
                self._course.on_priority(driver.set_priority)
                await driver.take_up()
                await self._course.along(carry(driver))
            except ControllerLost:
                raise  # another process drives the run now: nothing here may be cleaned up
            except BaseException as error:
                failure = error
            why = "training is done" if failure is None else str(failure) or type(failure).__name__
            keep = not isinstance(failure, asyncio.CancelledError) and self._hands_on()
            await unbroken(self._clean_up(driver, why, keep, save=not isinstance(failure, TrialPruned)))
            if failure is not None:
                raise failure

    async def _recall(self, driver: RunDriver) -> None:
        """What an earlier driver has heard of the run."""
        fence = await driver.fence()
        if not self._config.commits and fence.attempt:
            self._course.recall(await asyncio.to_thread(read_logged, driver.run_dir), self._metric)
        elif fence.commits:
            rows = await asyncio.to_thread(read_metrics, driver.run_dir, fence)
            self._course.recall(rows, self._metric, (commit.step for commit in fence.commits))

    async def _clean_up(self, driver: RunDriver, why: str, keep: bool, save: bool) -> None:
        for left in reversed(range(CLEAN_UP_TRIES)):
            try:
                return await driver.clean_up(why, keep, save)
            except (CloudError, StorageUnavailable) as error:
                if not left or (isinstance(error, CloudError) and not error.retryable):
                    raise
                self._report(f"cleaning up once more: {error}")
                await self._crew.clock.sleep(CLEAN_UP_AGAIN_S)

    def _report(self, text: str) -> None:
        self._crew.report(f"{self._config.name}: {text}")

    # --- what the gang says; what its program prints is in the bucket ---

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_end(self) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        if host.index != 0:
            return
        match record["event"]:
            case "start" if not self._config.commits:
                self._live.attempts += 1
                self._begins = True
            case "logged":
                if self._begins:
                    self._course.resumed(record["step"] - 1)
                    self._begins = False
                self._live.step, self._live.where = record["step"], host.name
                self._hear(record)
            case "restored":
                self._live.attempts += 1
                self._live.step = record["step"] or 0
                self._course.resumed(self._live.step)
            case "step":
                self._live.step, self._live.where = record["step"], host.name
                self._hear(record)
            case "commit":
                self._course.committed(record["step"])

    def _hear(self, record: dict[str, Any]) -> None:
        if isinstance(value := record.get(self._metric), int | float):
            self._live.value = value
            self._course.logged(record["step"], value)
