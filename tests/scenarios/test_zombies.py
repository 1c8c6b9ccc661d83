"""O1 in the large: all of a flow run is killed, with its worker or without, and it goes on; but not for ever."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import arun_deployment
from prefect.states import Crashed

from deployments.automations import RESTART_TAG, TAG, apply
from deployments.bench.worker_process import Worker, is_completed
from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import events_of, log_with
from tpu.runs.config import RunConfig
from tpu.runs.evaluation import load_evaluation
from tpu.worker.fate import GIVEN_UP, RESTARTED, RESTARTED_BY_AUTOMATION, TAKEN_FOR_DEAD
from tpu.worker.processes import ENGINE
from tpu.worker.worker import HEARTBEAT_S

# The least that is above a heartbeat, which Prefect sends every 30 s at most.
SILENT_S = int(HEARTBEAT_S) + 5


async def submitted(on: Worker, run: RunConfig, **job_variables: int) -> UUID:
    """A flow run with the tags of deployments/prefect.yaml."""
    started = await arun_deployment(
        f"train/{on.pool}", parameters={"run": run.model_dump(mode="json", exclude_unset=True)}, timeout=0,
        tags=[TAG, RESTART_TAG], job_variables=job_variables,
    )  # fmt: skip
    return started.id


def run_steps(run: RunConfig) -> range:
    """The steps that are committed and evaluated."""
    return range(20, run.steps + 1, 20)


async def states(flow_run: UUID) -> list[State]:
    async with get_client() as client:
        return sorted(await client.read_flow_run_states(flow_run), key=lambda state: state.timestamp)


async def until_said(flow_run: UUID, message: str, after: int, within_s: float = 120.0) -> None:
    """Return once a state later than the first `after` of them has this message."""
    async with asyncio.timeout(within_s):
        while True:
            if message in [state.message for state in (await states(flow_run))[after:]]:
                return
            await asyncio.sleep(0.5)


@pytest.mark.slow
async def test_O1_flow_supervisor_and_worker_are_killed_and_another_worker_goes_on(
    worker: Worker, lab: Lab, automations: None, tmp_path: Path
):  # fmt: skip
    evaluated, hold = tmp_path / "evaluated", tmp_path / "hold"
    worker.stop()
    worker.environment |= {"EVALUATED": str(evaluated), "HOLD": str(hold)}
    worker.start()
    await apply(silent_s=SILENT_S)
    run = lab.numpy_run("orphaned", steps=600, every=20, step_s=0.15, evaluate="commits",
                        evaluate_command=[sys.executable, "-m", "tests.trainers.evaluator"])  # fmt: skip
    flow_run = await submitted(worker, run)
    await lab.until_step(run.name, 40)
    directory = lab.directory(run.name)
    await lab.until(lambda: load_evaluation(directory, 20), "an evaluation")
    worker.stop()
    worker.kill_flow(flow_run)
    answered = [step for step in run_steps(run) if load_evaluation(directory, step)]
    before, known = lab.newest_step(run.name), len(await states(flow_run))

    # The server alone finds out, and schedules it again; nobody is there to take it.
    await until_said(flow_run, TAKEN_FOR_DEAD, known)
    await until_said(flow_run, RESTARTED_BY_AUTOMATION, known)
    trained_on = lab.newest_step(run.name)
    assert trained_on > before
    worker.start()
    assert is_completed(await worker.ended(flow_run, 180.0))

    # The gang that trained on alone was taken up, and what was done is not done again: neither segments, since the
    # commits in the bucket tell, nor evaluations, whose answers lie beside them.
    assert [event.detail["attempt"] for event in lab.events(run.name, "attempt-started")] == [1]
    assert lab.verdicts(run.name) == ["finished"]
    asked = [int(step) for step in evaluated.read_text().split()]
    assert set(asked) == set(run_steps(run))
    assert [asked.count(step) for step in answered] == [1] * len(answered)
    lab.assert_as_undisturbed(run)
    found = await events_of(run.name, "tpu.run.finished")
    assert [one.event for one in found].count("tpu.run.finished") == 1
    assert {"flow-run", "flow", "deployment", "work-queue", "work-pool", "slice", "zone", "tag"} <= {
        one.role for one in found[0].related
    }


@pytest.mark.slow
async def test_what_is_killed_again_and_again_is_given_up_and_nothing_of_it_is_left(
    worker: Worker, lab: Lab, automations: None
):  # fmt: skip
    await apply()
    run = lab.numpy_run("cursed", steps=4000, every=20, step_s=0.1)
    flow_run = await submitted(worker, run, restarts=2)
    for number in (1, 2, 3):
        await lab.until(lambda n=number: len(lab.events(run.name, "driver-started")) == n, f"start {number}")
        await lab.until_step(run.name, 20)
        if number == 1:  # the automation starts it again then, not the worker
            async with get_client() as client:
                await client.set_flow_run_state(flow_run, Crashed(), force=True)
        worker.kill_flow(flow_run)
    state = await worker.ended(flow_run)
    assert (state.is_crashed(), state.name) == (True, GIVEN_UP)
    assert "started again by itself 2 time(s) at most" in (state.message or "")
    again = [one.message for one in await states(flow_run) if one.name == "AwaitingRetry"]
    assert set(again) <= {RESTARTED, RESTARTED_BY_AUTOMATION}
    lab.assert_nothing_left()
    assert lab.verdicts(run.name) == ["cancelled"]
    assert len(lab.events(run.name, "driver-started")) == 4  # the last one is that which left nothing
    (said,) = [one for one in await events_of(run.name, "tpu.run.failed") if one.event == "tpu.run.failed"]
    assert {"flow-run", "deployment", "work-pool"} <= {one.role for one in said.related}


@pytest.fixture
async def executing(lab: Lab, worker: Worker) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Processes of flow runs that this test starts as a worker would; the worker itself is dead."""
    worker.stop()
    started: list[asyncio.subprocess.Process] = []
    yield started
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_a_flow_run_that_is_started_again_while_its_old_process_lives_ends_once(
    worker: Worker, lab: Lab, executing: list[asyncio.subprocess.Process]
):  # fmt: skip
    run = lab.numpy_run("doubled", steps=100, every=10, step_s=0.1)
    flow_run = await submitted(worker, run)

    async def execute(number: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", ENGINE, str(flow_run), env=os.environ | lab.environment,
            stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        executing.append(process)
        await lab.until(lambda: len(lab.events(run.name, "driver-started")) == number, f"driver {number}")
        return process

    old = await execute(1)
    await lab.until_step(run.name, 10)
    with lab.frozen("numpy_trainer"):  # so that it does not end before the second process has come
        new = await execute(2)
        # The old one leaves quietly: neither gang nor slice nor the state of the flow run is its own any more.
        assert await asyncio.wait_for(old.wait(), 60) == 0
        assert new.returncode is None
        assert (await states(flow_run))[-1].is_running()
    assert await asyncio.wait_for(new.wait(), 90) == 0
    assert [state.name for state in await states(flow_run)][-3:] == ["Running", "Running", "Completed"]
    await log_with(run.name, "this flow run was started again elsewhere")
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)
