"""Runs without Prefect: the same driver that the flow uses, against the emulator."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runs.terminal import Terminal
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Fence, load_fence
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.controller import this_process
from tpu.runs.driver import RunDriver
from tpu.runs.opening import open_run
from tpu.runs.record import RunRecord, create_or_take_up, load_record, run_directory
from tpu.runs.stopping import NoListener
from tpu.runtime.metrics import read_metrics

WAIT_S = 60.0


@dataclass
class Track:
    """An emulated cloud on which runs are driven by this process."""

    emulator: Emulator
    folder: Path

    @property
    def bucket(self) -> str:
        return self.emulator.env["TPU_RELAY_BUCKET"]

    def directory(self, name: str) -> str:
        return run_directory(self.bucket, name)

    def numpy_run(
        self, name: str, *, steps: int = 40, every: int = 20, step_s: float = 0.0, **values: Any
    ) -> RunConfig:
        """A small NumPy training through the real contract."""
        return parse_run_config(
            {
                "name": name,
                "command": [sys.executable, "-m", "tests.trainers.numpy_trainer"],
                "contract": True,
                "steps": steps,
                "checkpoints": {"every": every},
                "variables": {"NUMPY_STEP_SECONDS": str(step_s)} | values.pop("variables", {}),
                "evaluate": "never",
            }
            | values
        )

    @contextlib.asynccontextmanager
    async def driving(
        self, run: RunConfig, report: Callable[[str], None] = lambda _: None, folder: Path | None = None
    ) -> AsyncIterator[RunDriver]:
        """A driver of a run, with the hosts' words dropped."""
        async with open_run(
            run,
            this_process(f"test-{run.name}"),
            secrets={},
            report=report,
            listener=NoListener(),
            connection=Connection.from_environment(self.emulator.env),
            folder=folder or self.folder,
        ) as driver:
            await driver.take_up()
            yield driver

    async def train(self, run: RunConfig) -> RunRecord:
        """Train a run to its end, as the flow does, and clean up whatever happens."""
        async with self.driving(run) as driver:
            try:
                for stop in driver.record.segments:
                    await self.segment(driver, stop)
            finally:
                await driver.clean_up("the test is done with it")
        return load_record(self.directory(run.name))

    async def segment(self, driver: RunDriver, stop: int) -> None:
        if await driver.committed(stop):
            return
        if driver.attempt is None:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
        await driver.wait_for_commit(stop)

    def record(self, name: str, **values: Any) -> RunRecord:
        """A run that was created and never started."""
        code = {"source": "nowhere", "sha256": "0" * 64}
        return create_or_take_up(
            self.directory(name), RunRecord(self.numpy_run(name, **values), None, code, 1.7e9)
        )

    def fence(self, name: str) -> Fence:
        return load_fence(self.directory(name))

    def digest(self, name: str, step: int | None = None) -> str:
        return run_digest(self.directory(name), step, prefix="")

    def losses(self, name: str) -> list[tuple[Any, Any]]:
        return [(row["step"], row["loss"]) for row in read_metrics(self.directory(name), self.fence(name))]

    def assert_nothing_left(self) -> None:
        assert self.emulator.nodes() == []
        assert self.emulator.queued_resources() == []
        assert self.emulator.processes() == []


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` gives something true."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if answer := await asyncio.to_thread(condition):
                return answer
            await asyncio.sleep(0.05)


@pytest.fixture
def track(emulator: Emulator, program_folder: Path) -> Track:
    return Track(emulator, program_folder)


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capfd)
