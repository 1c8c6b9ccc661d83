"""Runs that are started as deployments and carried by the worker: ends, failures, secrets, and whatever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from deployments.bench.worker_process import Worker, is_completed
from flows.reap import reap
from flows.train import train
from tests.scenarios.conftest import SECRET, SECRET_VARIABLE, Lab, soon_and_again, until_fired
from tests.scenarios.prefect_record import artifacts, log_with
from tests.trainers.gate import Gate
from tpu.checkpoint import files


async def test_O3_a_restarted_worker_takes_its_flow_runs_up_and_they_end_with_a_report(
    worker: Worker, lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("bereft", steps=40, every=20, variables=gate.variables)
    flow_run = await worker.submit(run)
    await lab.until_step(run.name, 20)
    worker.stop()
    worker.start()
    await log_with(run.name, "which was restarted")
    gate.open()
    assert is_completed(await worker.ended(flow_run))
    done = await worker.flow_run(flow_run)
    assert (done.name, done.parameters["run"]["slice"]["zone"]) == (run.name, "us-central2-b")
    assert "Finished in state Completed" in worker.log.read_text()
    assert f"report-{run.name}" in {artifact.key for artifact in await artifacts()}
    assert lab.verdicts(run.name) == ["finished"]
    lab.assert_as_undisturbed(run)


def kill_flow(worker: Worker, flow_run: UUID) -> None:
    worker.kill_flow(flow_run)


def kill_flow_and_worker(worker: Worker, flow_run: UUID) -> None:
    worker.stop()
    worker.kill_flow(flow_run)
    worker.start()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_flow, kill_flow_and_worker])
async def test_O1_killed_in_a_segment_the_run_goes_on_with_its_gang(
    worker: Worker, lab: Lab, kill: Callable[[Worker, UUID], None]
):
    run = lab.numpy_run(kill.__name__.replace("_", "-"), steps=150, every=10, step_s=0.1)
    flow_run = await worker.submit(run)
    await lab.until_step(run.name, 10)
    kill(worker, flow_run)
    assert is_completed(await worker.ended(flow_run))
    assert (await worker.flow_run(flow_run)).run_count == 2
    # The same gang, so no step was made twice; the same slice.
    assert lab.verdicts(run.name) == ["finished"]
    assert len(lab.events(run.name, "slice-intended")) == 1
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_O1_killed_with_its_worker_before_it_began_it_is_started_again(worker: Worker, lab: Lab):
    run = lab.numpy_run("before-it-began", steps=10, every=10)
    flow_run = await worker.submit(run)
    begun = await worker.until_flow_run(flow_run, lambda now: now.infrastructure_pid is not None)
    assert begun.run_count == 0
    kill_flow_and_worker(worker, flow_run)
    assert is_completed(await worker.ended(flow_run))
    lab.assert_as_undisturbed(run)


@pytest.mark.slow  # in short form without a worker: test_reaper.py
async def test_O5_one_deployment_triggered_three_times_is_never_one_mixed_run(
    worker: Worker, lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("again", steps=40, every=20, variables=gate.variables)
    first = await worker.submit(run)
    await lab.until_step(run.name, 20)
    same, fresh = await asyncio.gather(worker.submit(run), worker.submit(run, fresh_name=True))
    refused = await worker.ended(same)
    assert refused.is_failed()
    assert "and alive; nothing was changed" in (refused.message or "")
    gate.open()
    assert is_completed(await worker.ended(fresh))
    assert is_completed(await worker.ended(first))
    own = run.model_copy(update={"name": f"again-{str(fresh)[:8]}"})
    for trained in (run, own):
        assert lab.verdicts(trained.name) == ["finished"]
        lab.assert_as_undisturbed(trained)


RAISES = """
for i in range(5000):
    print("flood", i)
def step():
    raise ValueError("the loss is not finite")
step()
"""


async def test_O6_O8_the_users_traceback_ends_the_log_and_the_run_and_leaves_no_slice(
    worker: Worker, lab: Lab
):
    run = lab.numpy_run("raises", command=[sys.executable, "-c", RAISES], contract=False, steps=1,
                        budget={"user_failure": 1})  # fmt: skip
    state = await worker.ended(await worker.submit(run))
    lab.assert_nothing_left()
    assert state.is_failed()
    assert "ValueError: the loss is not finite" in (state.message or "")
    assert lab.verdicts(run.name) == ["user failure"] * 2
    log = await log_with(run.name, "Finished in state Failed")
    assert log.count("w0 | Traceback (most recent call last)") == 2
    assert log.count("w0 | ValueError: the loss is not finite") == 2
    assert log.count("w0 | flood 4999") == 2  # the last line before
    assert "2 times user failure, and the budget" in log


LEAKS = """
import json, os, runpy, sys
print("token", os.environ["API_TOKEN"], "and", os.environ["PASSWORD"])
print(json.dumps(dict(os.environ)), file=sys.stderr)
if os.environ["RELAY_ATTEMPT"] == "1":
    raise ValueError("cannot log in with " + os.environ["PASSWORD"])
runpy.run_module("tests.trainers.numpy_trainer", run_name="__main__")
"""


async def test_O7_a_secret_of_the_workers_environment_or_of_a_block_is_nowhere_else(worker: Worker, lab: Lab):
    from prefect.blocks.system import Secret

    password = 'pass"word \\ with $signs'
    await Secret(value=password).save("o7-worker", overwrite=True)  # type: ignore[misc]
    run = lab.numpy_run("discreet", steps=20, command=[sys.executable, "-c", LEAKS], step_s=0.1,
                        secrets={"API_TOKEN": f"env:{SECRET_VARIABLE}", "PASSWORD": "block:o7-worker"})  # fmt: skip
    flow_run = await worker.submit(run)
    seen: dict[str, str] = {}
    while worker.left_of(flow_run) or not (await worker.flow_run(flow_run)).run_count:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            seen[f"command line {path}"] = read(path)
        seen["cloud"] = json.dumps(lab.emulator.status())
        # What Prefect puts into the flow's temporary folder is its environment, which it may read anyway.
        seen |= {str(path): read(path) for path in worker.folder.rglob("*") if "tmp" not in path.parts}
        await asyncio.sleep(0.05)
    assert is_completed(await worker.ended(flow_run))
    assert lab.verdicts(run.name) == ["user failure", "finished"]
    seen["Prefect's log"] = str(await log_with(run.name, "w0 | token", "Finished in state Completed"))
    seen["worker's output"] = worker.log.read_text()
    # All that the server keeps: logs, parameters, job variables, artifacts, events; blocks are encrypted.
    for path in Path(worker.environment["PREFECT_HOME"]).rglob("*"):
        seen[str(path)] = read(path)
    for path in files.filesystem().find(lab.emulator.env["TPU_RELAY_BUCKET"]):
        seen[path] = files.read(f"gs://{path}").decode(errors="replace")
    assert any("logs/2/" in url for url in seen)
    # The database of PostgreSQL is no file of ours.
    store = "Prefect's log" if os.environ.get("TPU_RELAY_TEST_DB") == "postgres" else "prefect.db"
    assert any("w0 | token" in text for where, text in seen.items() if store in where)
    for where, text in seen.items():
        for secret in (SECRET, password):
            for form in (secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret))[3:-3]):
                assert form not in text, f"a secret is in {where}"


def read(path: Path) -> str:
    """A file that may go while it is read; empty if it has."""
    try:
        return path.read_bytes().decode(errors="replace") if os.access(path, os.R_OK) else ""
    except OSError:
        return ""


async def test_a_schedule_that_fires_trains_a_run_and_puts_the_project_in_order(worker: Worker, lab: Lab):
    run = lab.numpy_run("nightly", steps=20, every=10)
    schedule = soon_and_again(every_s=2 * 60)
    values = {"run": run.model_dump(mode="json", exclude_unset=True), "fresh_name": True}
    deployments = [
        await worker.deploy_flow(f"{worker.pool}-nightly", train, values, [schedule]),
        await worker.deploy_flow(f"{worker.pool}-reap", reap, {}, [schedule]),
    ]
    ended: list[FlowRun] = []
    for deployment in deployments:
        (fired,) = await until_fired(deployment)
        assert is_completed(await worker.ended(fired.id))
        ended.append(await worker.flow_run(fired.id))
        async with get_client() as client:
            await client.pause_deployment(deployment)  # it would fire again
    name = ended[0].parameters["run"]["name"]
    assert name.startswith("nightly-")
    assert {f"report-{name}", "reaper"} <= {artifact.key for artifact in await artifacts()}
    lab.assert_as_undisturbed(run.model_copy(update={"name": name}))
