"""`prefect worker start` for a pool of its own, and what runs through it: for tests and benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import arun_deployment
from prefect.states import Cancelling
from prefect.workers.process import ProcessWorker

from tpu.runs.config import RunConfig
from tpu.worker.processes import end_processes, flow_processes
from tpu.worker.where import worker_folder
from tpu.worker.worker import CloudTpuWorker

END_S = 90.0
LOOK_S, ENDED_LOOK_S = 0.05, 0.2


class Worker:
    """A worker that can be killed, paused and started again; `deploy` comes first."""

    def __init__(
        self,
        pool: str,
        environment: Mapping[str, str],
        folder: Path,
        program_folder: Path,
        kind: Literal["cloud-tpu", "process"] = "cloud-tpu",
    ) -> None:
        self.pool, self.log, self._kind = pool, folder / "worker.log", kind
        self.environment = dict(environment)
        self.folder = worker_folder(pool, environment)
        self._program_folder = program_folder
        self._process: subprocess.Popen[bytes] | None = None

    # --- its process ---

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", self.pool],
                env=os.environ | self.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still (SIGSTOP) for the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    # --- what runs through it ---

    async def make_pool(self) -> None:
        kind = CloudTpuWorker if self._kind == "cloud-tpu" else ProcessWorker
        template = kind.get_default_base_job_template()
        async with get_client() as client:
            await client.create_work_pool(
                WorkPoolCreate(name=self.pool, type=self._kind, base_job_template=template)
            )

    async def deploy_flow(
        self,
        name: str,
        flow: Any,
        parameters: dict[str, Any] | None = None,
        schedules: list[DeploymentScheduleCreate] | None = None,
    ) -> UUID:
        async with get_client() as client:
            return await client.create_deployment(
                await client.create_flow(flow), name, work_pool_name=self.pool, parameters=parameters,
                schedules=schedules, entrypoint=f"{flow.fn.__code__.co_filename}:{flow.fn.__name__}",
                pull_steps=[
                    {"prefect.deployments.steps.set_working_directory": {"directory": str(self._program_folder)}}
                ],
            )  # fmt: skip

    async def submit(self, run: RunConfig, **parameters: Any) -> UUID:
        """Start the flow `train`, whose deployment is named after the pool."""
        values = {"run": run.model_dump(mode="json", exclude_unset=True), **parameters}
        return (await arun_deployment(f"train/{self.pool}", parameters=values, timeout=0)).id

    async def cancel(self, flow_run_id: UUID) -> None:
        """As the button of the UI does."""
        async with get_client() as client:
            await client.set_flow_run_state(flow_run_id, Cancelling())

    async def flow_run(self, flow_run_id: UUID) -> FlowRun:
        async with get_client() as client:
            return await client.read_flow_run(flow_run_id)

    async def until_flow_run(self, flow_run_id: UUID, condition: Callable[[FlowRun], bool]) -> FlowRun:
        async with get_client() as client, asyncio.timeout(END_S):
            while True:
                if condition(now := await client.read_flow_run(flow_run_id)):
                    return now
                await asyncio.sleep(LOOK_S)

    def kill_flow(self, flow_run_id: UUID) -> None:
        """SIGKILL of all its processes on this machine; its gang trains on."""
        assert end_processes(str(flow_run_id), signal.SIGKILL)

    def left_of(self, flow_run_id: UUID) -> bool:
        """Whether processes or files of a flow run are on this machine."""
        return (self.folder / str(flow_run_id)).exists() or str(flow_run_id) in flow_processes()

    async def ended(self, flow_run_id: UUID, within_s: float = END_S) -> State:
        """The state of a flow run once it is final and nothing of it is left on this machine."""
        began, state = time.monotonic(), None
        async with get_client() as client:
            while time.monotonic() - began < within_s:
                state = (await client.read_flow_run(flow_run_id)).state
                if state is not None and state.is_final() and not self.left_of(flow_run_id):
                    return state
                await asyncio.sleep(ENDED_LOOK_S)
        raise AssertionError(f"{state} after {within_s:.0f} s; the worker says:\n{self.log.read_text()}")

    def kill_all(self) -> None:
        """End what a test that failed has left, so that the next one finds nothing of it."""
        for folder in self.folder.glob("*"):
            end_processes(folder.name, signal.SIGKILL)


def is_completed(state: State) -> bool:
    assert state.is_completed(), state
    return True
