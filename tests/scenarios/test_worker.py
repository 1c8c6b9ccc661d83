"""O3: the worker that runs flows restarts. Its flow run and its slice are taken up; nothing is trained twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import AwaitingRetry

from flows.train import train
from tests.scenarios.conftest import Lab
from tpu.runs.config import RunConfig

POOL = "workers-of-a-test"


@contextlib.asynccontextmanager
async def worker(lab: Lab, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A plain Prefect worker in a session of its own; killed at the end of the block."""
    with (folder / "worker.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "prefect"),
            "worker", "start", "--pool", POOL, "--type", "process", "--name", "one", "--limit", "2",
            env=os.environ | lab.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"},
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def submitted(run: RunConfig, folder: Path) -> FlowRun:
    """A flow run for the worker, as a deployment makes it."""
    flow: Flow[..., Any] = train
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        flow_id = await client.create_flow(flow)
        deployment = await client.create_deployment(
            flow_id, f"train-{run.name}", entrypoint="flows.train.train", work_pool_name=POOL,
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}],
        )  # fmt: skip
        return await client.create_flow_run_from_deployment(
            deployment, parameters={"run": run.model_dump(mode="json")}
        )


def processes_of(flow_run: FlowRun) -> list[int]:
    """Processes on this machine that execute a flow run."""
    found, mark = [], f"PREFECT__FLOW_RUN_ID={flow_run.id}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [int(process.name)] if mark in (process / "environ").read_bytes() else []
    return found


async def test_O3_a_worker_restarts_and_its_flow_run_and_slice_are_taken_up(
    lab: Lab, tmp_path: Path, program_folder: Path
):
    run = lab.numpy_run("worked", steps=40, every=10, step_s=0.5)
    flow_run = await submitted(run, program_folder)
    async with worker(lab, tmp_path) as first:
        await lab.until_step(run.name, 10)
        # The worker's machine goes down: nobody is left to say that the flow run has ended.
        executing = processes_of(flow_run)
        assert executing
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (first.pid, *executing):
                os.kill(pid, number)
        await first.wait()
    await lab.until(lambda: not processes_of(flow_run), "the end of its processes")
    # The gang is nobody's child.
    await lab.until_step(run.name, 20)
    async with get_client() as client:
        # As an automation does when no heartbeat comes any more.
        await client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)
    async with worker(lab, tmp_path):
        await lab.until(lambda: lab.verdicts(run.name), "the end of the run")
        await lab.until(lambda: not processes_of(flow_run), "the end of its processes")
    async with get_client() as client:
        after = await client.read_flow_run(flow_run.id)
    assert after.state is not None
    assert (after.state.type, after.run_count) == (StateType.COMPLETED, 2)
    assert lab.verdicts(run.name) == ["finished"]
    assert len(lab.events(run.name, "attempt-started")) == len(lab.events(run.name, "slice-intended")) == 1
    lab.assert_as_undisturbed(run)
