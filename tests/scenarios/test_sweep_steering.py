"""Sweeps that stop trials early, and sweeps that are steered while they run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterName
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import CancelledRun

from flows.sweep import sweep
from tests.scenarios.conftest import Lab, Pool, beside
from tpu.checkpoint import files
from tpu.connection import Connection
from tpu.runs.config import RunConfig
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import Search, check_sweep, parse_search, parse_sweep
from tpu.sweeps.steering import (
    Steered,
    add_point,
    cancel_trials,
    find_sweep,
    raise_runs,
    set_priority,
    stop_sweep,
    who_hears,
)
from tpu.sweeps.trial import Trial

# Logs what it is told to, so that it is known which trial is worse.
LEVEL = """
import os, time
import numpy as np
from tpu.runtime import segment

with segment.start() as seg:
    state = seg.restore({"w": np.zeros(2, np.float32)})
    for step in seg.steps():
        time.sleep(float(os.environ["STEP_S"]))  # the work of a step
        seg.log(step + 1, loss=float(os.environ["LEVEL"]))
        seg.checkpoint(step + 1, state)
"""


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_RELAY_HOME", str(tmp_path))


def leveled(lab: Lab, folder: Path, name: str, step_s: float, **values: Any) -> RunConfig:
    (folder / "level.py").write_text(LEVEL)
    return lab.numpy_run(
        name,
        steps=30,
        every=10,
        command="python level.py",
        slice={"chips": 1},
        variables={"STEP_S": step_s},
        **values,
    )


def search_of(run: RunConfig, levels: list[float], **values: Any) -> Search:
    made = parse_search({"parameters": {"variables.LEVEL": {"values": [str(x) for x in levels]}}} | values)
    check_sweep(run, made)
    return made


def found(name: str) -> Steered:
    return find_sweep(Connection.from_environment().bucket, name)


def trials(name: str) -> list[Trial]:
    return SweepBook(sweep_directory(Connection.from_environment().bucket, name)).trials()


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.read(f"{found(name).sweep_dir}/results.jsonl").splitlines()]


async def prefect_state(trial: Trial) -> tuple[str, str]:
    """Name and message of the state in which a trial's task has ended last."""
    where = TaskRunFilter(name=TaskRunFilterName(like_=f"trial {trial.number}: {trial.run}"))
    async with get_client() as client:
        newest, *_ = await client.read_task_runs(
            task_run_filter=where, sort=TaskRunSort.EXPECTED_START_TIME_DESC
        )
    assert newest.state is not None
    return newest.state.name or "", newest.state.message or ""


async def test_a_trial_that_falls_behind_is_pruned_at_its_commit_also_by_what_was_heard_before_the_sweep_was_stopped(
    lab: Lab, pool: Pool, program_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tpu.runs.controller.BEAT_S", 0.3)  # by which a stop is heard
    await pool.set(max_slices=1)
    base = leveled(lab, program_folder, "behind", 0.1)
    pruner = {"type": "successive-halving", "min_resource": 10, "reduction_factor": 2}
    search = search_of(base, [1, 9, 0.5, 5], at_once=1, pruner=pruner)
    task = asyncio.create_task(sweep(run=base, search=search))
    (first,) = await lab.until(lambda: trials("behind"), "its first trial", task)
    await lab.until_step(first.run, 10, task)
    await stop_sweep(Connection.from_environment(), found("behind"), print)
    with pytest.raises(CancelledRun):
        await task
    lab.assert_nothing_left()

    answer = await sweep(run=base, search=search)
    assert (answer["finished"], answer["pruned"], answer["failed"]) == (2, 2, 0)
    assert answer["best"]["parameters"] == {"variables.LEVEL": "0.5"}
    outcomes = found("behind").book.outcomes()
    assert outcomes[0].reports == ((10, 1.0), (20, 1.0))  # the first of them by the start before
    assert [outcomes[n].state for n in range(4)] == ["finished", "pruned", "finished", "pruned"]
    why = "successive-halving: loss 9 at step 10 is not in the best 1/2 of the 2 that came there; the best has 1"
    assert (outcomes[1].step, outcomes[1].reason) == (10, why)
    assert outcomes[3].reason.endswith("of the 4 that came there; the best has 0.5")
    assert [row["state"] for row in rows("behind")] == ["finished", "pruned", "finished", "pruned"]
    # It ended at that commit: no later one, and no failure; its chip went to the next one at once.
    assert [commit.step for commit in lab.fence(trials("behind")[1].run).commits] == [10]
    assert await prefect_state(trials("behind")[1]) == ("Pruned", why)
    slices = {e.detail["slice"] for t in trials("behind")[1:] for e in lab.events(t.run, "attempt-started")}
    assert len(slices) == 1
    lab.assert_nothing_left()


async def test_a_running_sweep_takes_more_trials_another_priority_and_lets_one_be_cancelled(
    lab: Lab, pool: Pool, program_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tpu.sweeps.queue.LOOK_S", 0.2)
    await pool.set(max_slices=1)
    base = leveled(lab, program_folder, "steered", 0.6)  # the first still runs when the second has committed
    search = search_of(base, [3, 2], trials=1, at_once=2)
    async with beside(sweep(run=base, search=search)) as task:
        await lab.until(lambda: lab.ready_nodes(), "it has a slice", task)
        steered = found("steered")
        assert "hears it within seconds" in who_hears(steered)
        assert "priority 7" in set_priority(steered, 7)[0]
        add_point(steered, {"variables.LEVEL": "0.25"})
        await lab.until(lambda: len(steered.book.trials()) == 2, "the added trial has begun", task)
        first, added = steered.book.trials()
        await lab.until_step(added.run, 10, task)
        holders = [holder for lease in await pool.leases() for holder in lease.holders]
        assert {holder.run: holder.priority for holder in holders} == {first.run: 7, added.run: 7}
        cancel_trials(steered, [added.run])
        raise_runs(steered, 2)
    assert {n: outcome.state for n, outcome in steered.book.outcomes().items()} == {
        0: "finished", 1: "stopped", 2: "finished"
    }  # fmt: skip
    assert [trial.parameters["variables.LEVEL"] for trial in steered.book.trials()] == ["3", "0.25", "2"]
    assert await prefect_state(added) == ("Stopped", "cancelled by request")
    assert lab.fence(added.run).commits  # it has saved
    assert "nobody drives the sweep" in who_hears(steered)
    lab.assert_nothing_left()
    # What was cancelled stays so, until it is asked for again.
    assert (await sweep(run=base, search=search))["stopped"] == 1
    again = await sweep(run=base, search=search, rerun_failed=True)
    assert (again["finished"], again["best"]["parameters"]) == (3, {"variables.LEVEL": "0.25"})
    assert lab.verdicts(added.run) == ["cancelled", "finished"]


@pytest.mark.slow
async def test_trials_that_failed_are_started_again_with_newer_code_and_say_so(
    lab: Lab, pool: Pool, program_folder: Path
):
    await pool.set(max_slices=1)
    base = leveled(lab, program_folder, "mended", 0.0, budget={"user_failure": 0})
    (program_folder / "level.py").write_text(
        LEVEL + "        assert os.environ['LEVEL'] != '2' or step < 14\n"
    )
    search = search_of(base, [1, 2], at_once=2)
    assert (await sweep(run=base, search=search))["failed"] == 1
    (program_folder / "level.py").write_text(LEVEL)
    assert (await sweep(run=base, search=search, rerun_failed=True, code="newest"))["finished"] == 2
    whole, mended = rows("mended")
    assert (whole["mixed"], mended["mixed"]) == ("", "code")
    assert mended["code"].split(", ")[0] == whole["code"]
    assert len(mended["code"].split(", ")) == 2
    assert lab.verdicts(mended["run"]) == ["user failure", "finished"]


# Knows nothing of us: it writes its metrics into a file of its own, and the last one is a bad one.
FOREIGN = """
import argparse, json, time
parser = argparse.ArgumentParser()
parser.add_argument("--level", type=float)
level = parser.parse_args().level
with open("metrics.jsonl", "w") as file:
    for epoch in range(1, 6):
        time.sleep(0.4)  # the work of an epoch
        print(json.dumps({"val": {"loss": level / epoch if epoch < 5 else 99}}), file=file, flush=True)
"""
WANDB = """
program: foreign.py
method: grid
metric: {name: val.loss, goal: minimize, value: min}
early_terminate: {type: hyperband, min_iter: 2, eta: 2}
parameters: {level: {values: [1.0, 8.0, 0.5]}}
run: {metrics_file: metrics.jsonl, slice: {accelerator_type: v4-8, zone: us-central2-b, chips: 1}}
at_once: 1
"""


async def test_a_weights_and_biases_file_of_any_program_has_its_metric_and_its_early_stops(
    lab: Lab, pool: Pool, program_folder: Path
):
    await pool.set(max_slices=1)
    (program_folder / "foreign.py").write_text(FOREIGN)
    read = parse_sweep(yaml.safe_load(WANDB), "foreign")
    answer = await sweep(run=read.run, search=read.search)
    assert (answer["finished"], answer["pruned"], answer["failed"]) == (2, 1, 0)
    first, second, third = (outcome for _, outcome in sorted(found("foreign").book.outcomes().items()))
    assert (first.value, first.reports) == (0.25, ((1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.25)))
    assert second.reason.startswith(
        "successive-halving: val.loss 4 at step 2 is not in the best 1/2 of the 2"
    )
    assert (third.state, third.logged) == ("finished", ("val.loss",))
    lab.assert_nothing_left()
