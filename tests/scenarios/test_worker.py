"""Runs that are started as deployments and carried by the worker: ends, cancellations, and a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.states import Cancelling

from flows.train import train
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import artifacts, log_with
from tpu.runs.config import RunConfig
from tpu.worker.processes import flow_processes
from tpu.worker.where import worker_folder
from tpu.worker.worker import CloudTpuWorker

END_S, CANCEL_S = 90.0, 30.0


class Worker:
    """`prefect worker start` for a pool of its own, and runs through it."""

    def __init__(self, lab: Lab, pool: str, folder: Path, program_folder: Path) -> None:
        self.lab, self.pool, self.log = lab, pool, folder / "worker.log"
        self.program_folder = program_folder
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "prefect", "worker", "start", "--pool", self.pool,
                env=os.environ | self.lab.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"},
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    async def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.wait()

    async def deploy(self) -> None:
        async with get_client() as client:
            await client.create_work_pool(
                WorkPoolCreate(
                    name=self.pool, type="cloud-tpu",
                    base_job_template=CloudTpuWorker.get_default_base_job_template(),
                )
            )  # fmt: skip
            await client.create_deployment(
                await client.create_flow(train), self.pool, work_pool_name=self.pool,
                entrypoint="flows.train.train",
                pull_steps=[
                    {"prefect.deployments.steps.set_working_directory": {"directory": str(self.program_folder)}}
                ],
            )  # fmt: skip

    async def submit(self, run: RunConfig) -> UUID:
        started = await run_deployment(
            f"train/{self.pool}", parameters={"run": run.model_dump(mode="json", exclude_unset=True)}, timeout=0
        )  # fmt: skip
        return started.id

    async def ended(self, flow_run_id: UUID, within_s: float = END_S) -> FlowRun:
        """The flow run once its state is final and nothing of it is left on this machine."""
        folder = worker_folder(self.pool) / str(flow_run_id)
        began = time.monotonic()
        async with get_client() as client:
            while time.monotonic() - began < within_s:
                now = await client.read_flow_run(flow_run_id)
                over = now.state is not None and now.state.is_final()
                if over and not folder.exists() and str(flow_run_id) not in flow_processes():
                    return now
                await asyncio.sleep(0.2)
        raise AssertionError(f"{now.state} after {within_s:.0f} s; the worker says:\n{self.log.read_text()}")


@pytest.fixture
async def worker(
    lab: Lab, tmp_path: Path, program_folder: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Worker]:
    """A worker on a pool of its own; whatever it started is gone after the test."""
    made = Worker(lab, f"tpu-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}", tmp_path, program_folder)
    await made.deploy()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        print(made.log.read_text())


def is_cancelled(done: FlowRun) -> bool:
    assert done.state is not None
    return done.state.is_cancelled()


def is_completed(done: FlowRun) -> bool:
    assert done.state is not None
    assert done.state.is_completed(), done.state
    return True


async def test_O4_cancelled_in_the_ui_while_training_and_while_provisioning(worker: Worker, lab: Lab):
    trains = lab.numpy_run("trains", steps=4000, every=20, step_s=0.1)
    waits = lab.numpy_run("waits", steps=20, every=10)
    flow_runs = [await worker.submit(trains)]
    await lab.until(lambda: lab.events(trains.name, "attempt-started"), "an attempt")
    lab.emulator.set_delay(600)
    flow_runs.append(await worker.submit(waits))
    await lab.until(lambda: lab.nodes_in("CREATING"), "a node in creation")
    await lab.until_step(trains.name, 20)
    async with get_client() as client:
        for flow_run in flow_runs:
            await client.set_flow_run_state(flow_run, Cancelling())  # as the UI does
        for flow_run in flow_runs:
            async with asyncio.timeout(CANCEL_S):
                state = Cancelling()
                while not state.is_cancelled():
                    await asyncio.sleep(0.2)
                    state = (await client.read_flow_run(flow_run)).state or state
    assert all([is_cancelled(await worker.ended(flow_run)) for flow_run in flow_runs])
    lab.assert_nothing_left()
    assert lab.verdicts(trains.name) == ["cancelled"]


async def test_O3_a_restarted_worker_takes_its_flow_runs_up_and_they_end_with_a_report(
    worker: Worker, lab: Lab
):
    run = lab.numpy_run("bereft", steps=100, every=20, step_s=0.1)
    flow_run = await worker.submit(run)
    await lab.until_step(run.name, 20)
    await worker.stop()
    await worker.start()
    done = await worker.ended(flow_run)
    assert is_completed(done)
    assert (done.name, done.parameters["run"]["slice"]["zone"]) == (run.name, "us-central2-b")
    assert "which was restarted" in await log_with(run.name, "which was restarted")
    assert "Finished in state Completed" in worker.log.read_text()
    assert f"report-{run.name}" in {artifact.key for artifact in await artifacts()}
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_O1_when_all_processes_are_killed_the_run_goes_on_with_its_gang(worker: Worker, lab: Lab):
    run = lab.numpy_run("all-killed", steps=200, every=20, step_s=0.1)
    flow_run = await worker.submit(run)
    await lab.until_step(run.name, 20)
    lab.kill(list(flow_processes()[str(flow_run)]))
    done = await worker.ended(flow_run)
    assert is_completed(done)
    assert done.run_count == 2
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)
