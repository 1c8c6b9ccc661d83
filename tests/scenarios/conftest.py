"""Runs of the real flow against a real Prefect server and the emulator, for the faults of every scenario."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.prefect_server import prefect_server
from flows.train import train
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Fence, load_fence
from tpu.emulator.emulator import Emulator
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.record import run_directory
from tpu.runtime.metrics import read_metrics

WAIT_S = 90.0


@pytest.fixture(scope="session")
def prefect_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One Prefect server for the whole session."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as environment:
        yield environment


@dataclass
class Lab:
    """An emulated cloud with a Prefect server, in which runs are started and disturbed."""

    emulator: Emulator
    environment: dict[str, str]
    names: list[str] = field(default_factory=list)

    def numpy_run(
        self, name: str, *, steps: int = 60, every: int = 20, step_s: float = 0.02, **values: Any
    ) -> RunConfig:
        """A small NumPy training through the real contract."""
        variables = {"NUMPY_STEP_SECONDS": str(step_s)} | values.pop("variables", {})
        return parse_run_config(
            {
                "name": name,
                "command": [sys.executable, "-m", "tests.trainers.numpy_trainer"],
                "contract": True,
                "steps": steps,
                "checkpoints": {"every": every},
                "variables": variables,
                "evaluate": "never",
            }
            | values
        )

    def directory(self, name: str) -> str:
        return run_directory(self.emulator.env["TPU_RELAY_BUCKET"], name)

    async def train(self, run: RunConfig) -> dict[str, Any]:
        return await train(run)

    @contextlib.asynccontextmanager
    async def training(self, run: RunConfig) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
        """The flow beside the block; awaited at its end."""
        task = asyncio.create_task(self.train(run))
        try:
            yield task
            await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    @contextlib.asynccontextmanager
    async def flow_process(
        self, run: RunConfig, folder: Path, *arguments: str
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """`python -m flows.train` as a process of its own, so that it can be killed; killed at the end of the block."""
        file = folder / f"{run.name}.yaml"
        file.write_text(run.model_dump_json())  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flows.train", str(file), *arguments,
            env=os.environ | self.environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    # --- what can be seen ---

    def fence(self, name: str) -> Fence:
        return load_fence(self.directory(name))

    def newest_step(self, name: str) -> int:
        newest = self.fence(name).newest()
        return newest.step if newest else 0

    def events(self, name: str, kind: str | None = None) -> list[RunEvent]:
        return [event for event in load_events(self.directory(name)) if kind in (None, event.kind)]

    def verdicts(self, name: str) -> list[str]:
        return [event.detail["verdict"] for event in self.events(name, "attempt-ended")]

    def digest(self, name: str) -> str:
        return run_digest(self.directory(name), prefix="")

    def losses(self, name: str) -> list[tuple[Any, Any]]:
        return [(row["step"], row["loss"]) for row in read_metrics(self.directory(name), self.fence(name))]

    def ready_nodes(self) -> list[str]:
        return [node["name"].rpartition("/")[2] for node in self.emulator.nodes() if node["state"] == "READY"]

    async def until(
        self, condition: Callable[[], Any], what: str, task: asyncio.Task[Any] | None = None
    ) -> Any:
        """Poll until `condition` gives something true; fails after WAIT_S, or if the flow ends before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if answer := await asyncio.to_thread(condition):
                    return answer
                if task is not None and task.done():
                    task.result()
                    raise AssertionError(f"the flow ended before {what}")
                await asyncio.sleep(0.05)

    async def until_step(self, name: str, step: int, task: asyncio.Task[Any] | None = None) -> None:
        await self.until(lambda: self.newest_step(name) >= step, f"step {step} of {name} was committed", task)

    def assert_nothing_left(self) -> None:
        """No slice, no queued resource, no process on any host."""
        assert self.emulator.nodes() == []
        assert self.emulator.queued_resources() == []
        assert self.emulator.processes() == []


@pytest.fixture
async def lab(
    emulator: Emulator, prefect_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Lab]:
    """The lab; after each test nothing may be left in the cloud."""
    for name, value in prefect_environment.items():
        monkeypatch.setenv(name, value)
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        made = Lab(emulator, prefect_environment)
        yield made
        made.assert_nothing_left()
