"""Sweeps: trials on the chips of several slices, each as if it had been alone."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from arro3.io import read_parquet
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow_async

from flows.sweep import sweep
from tasks.sweep_board import SweepPage
from tests.scenarios.conftest import Lab, Pool, beside, soon_and_again, until_fired
from tests.scenarios.prefect_record import artifacts
from tests.sweeps.boards import BEGAN, board_of
from tests.sweeps.test_report import ALL
from tests.trainers.gate import Gate
from tpu.checkpoint import files, objects
from tpu.clock import SystemClock
from tpu.connection import Connection
from tpu.runs.config import RunConfig
from tpu.runs.controller import observe
from tpu.runs.overview import list_runs
from tpu.slices.lease import LeaseState
from tpu.slices.lease_book import GcsLeaseBook
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import Search, SweepError, check_sweep, parse_search
from tpu.sweeps.fleet import SliceLives
from tpu.sweeps.trial import trial_run
from tpu.worker.ending import end_run_of

SIZES = "variables.NUMPY_SIZE"


def search_of(run: RunConfig, **values: Any) -> Search:
    made = parse_search({"parameters": {SIZES: {"values": ["64", "96"]}}, "seeds": 3} | values)
    check_sweep(run, made)
    return made


def book(lab: Lab, name: str) -> SweepBook:
    return SweepBook(sweep_directory(lab.emulator.env["TPU_RELAY_BUCKET"], name))


@pytest.fixture(autouse=True)
def private_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_RELAY_HOME", str(tmp_path))


# The mean of a point's seeds is told to the study once a step.
@pytest.mark.filterwarnings("error:The reported value is ignored")
async def test_trials_share_two_slices_one_of_which_is_preempted_and_have_the_bits_of_runs_alone(
    lab: Lab, pool: Pool, tmp_path: Path
):
    await pool.set(max_slices=2)
    gate = Gate(tmp_path / "gate", before=15)
    slice = {"chips": 2, "price_an_hour": 4.0}
    base = lab.numpy_run("pair", steps=40, every=10, slice=slice, variables=gate.variables)
    search = search_of(base, at_once=3)
    async with beside(sweep(run=base, search=search)) as task:
        await lab.until(lambda: len(lab.ready_nodes()) == 2, "both slices are there", task)
        trials = await asyncio.to_thread(book(lab, "pair").trials)
        assert len(trials) == 3
        await lab.until(lambda: all(lab.newest_step(t.run) >= 10 for t in trials), "all three train", task)
        (full,) = [one for one in await pool.leases() if len(one.holders) == 2 and one.open]
        await asyncio.to_thread(lab.emulator.preempt, full.slice, notice=False)
        gate.open()
    assert task.result() == {
        "sweep": "pair", "finished": 6, "pruned": 0, "failed": 0, "stopped": 0, "best": task.result()["best"]
    }  # fmt: skip
    trials = book(lab, "pair").trials()
    assert len({trial.run for trial in trials}) == len(trials) == 6
    for trial in trials:
        lab.assert_as_undisturbed(trial_run(base, trial.parameters, trial.seed))
    preempted = [t.run for t in trials if lab.verdicts(t.run) == ["preempted", "finished"]]
    assert sorted(preempted) == sorted(holder.run for holder in full.holders)
    assert [lab.verdicts(t.run) for t in trials if t.run not in preempted] == [["finished"]] * 4
    lines = {line.name: line for line in list_runs(Connection.from_environment().bucket)}
    assert all((lines[trial.run].dollars or 0.0) > 0.0 for trial in trials)
    # Two slices, and one for the preempted one: none was made for a trial that could have had the last one's chips.
    assert len([one for one in await pool.leases() if one.ready is not None]) == 3
    assert all(one.state is LeaseState.GONE for one in await pool.leases())
    lab.assert_nothing_left()
    # What a person sees at the end, and what programs read.
    (report,) = [one for one in await artifacts() if one.key == "report-pair"]
    assert str(report.data).count("](data:image/png;base64,") == len(ALL)
    rows = book(lab, "pair").results()
    assert [row["attempts"] for row in rows] == [2 if row["run"] in preempted else 1 for row in rows]
    assert all(row["chip_hours"] > 0 and "chips" in row["where"] for row in rows)
    parquet = files.read(f"{book(lab, 'pair').sweep_dir}/results.parquet")
    assert read_parquet(io.BytesIO(parquet)).read_all()["run"].to_pylist() == [row["run"] for row in rows]
    assert files.read(f"{book(lab, 'pair').sweep_dir}/report/fleet.png").startswith(b"\x89PNG")


async def test_the_page_of_a_sweep_moves_in_place_and_no_oftener_than_a_server_bears(lab: Lab, pool: Pool):
    board, now = board_of(12), BEGAN + 200.0
    lives = SliceLives(GcsLeaseBook(Connection.from_environment().bucket), "default")
    page = SweepPage("many", board, book(lab, "many"), lives, SystemClock(), logging.getLogger("test"))
    for _ in range(50):
        await page.show()
    board.ended[11] = replace(board.ended[0], value=0.001, ended=now)
    del board.live[11]
    await page.close()
    (table,) = [one for one in await artifacts() if one.key == "sweep-many"]
    (report,) = [one for one in await artifacts() if one.key == "report-many"]
    assert "best loss 0.001 of many-0000000b" in str(table.description)
    assert "best loss 0.001 of many-0000000b" in str(report.data)


async def test_a_failing_trial_is_its_own_and_the_sweep_goes_on_where_it_was(lab: Lab, pool: Pool):
    await pool.set(max_slices=1)
    base = lab.numpy_run(
        "partly", steps=10, every=10, slice={"chips": 1}, budget={"user_failure": 0},
        variables={"NUMPY_FAIL_ATTEMPT": "1"},
    )  # fmt: skip
    search = search_of(
        base, parameters={"variables.NUMPY_FAIL": {"values": ["", "exit:3@5"]}}, seeds=2, at_once=4
    )
    answer = await sweep(run=base, search=search)
    assert (answer["finished"], answer["failed"]) == (2, 2)
    outcomes = book(lab, "partly").outcomes()
    assert [outcomes[n].state for n in range(4)] == ["finished", "finished", "failed", "failed"]
    assert "exit" in outcomes[2].reason
    # Started again nothing is done twice; asked for, what failed is, and goes on with the run that it was.
    assert (await sweep(run=base, search=search))["failed"] == 2
    assert len(lab.events(book(lab, "partly").trials()[0].run, "attempt-started")) == 1
    again = await sweep(run=base, search=search, rerun_failed=True)
    assert (again["finished"], again["failed"]) == (4, 0)
    assert [lab.verdicts(t.run) for t in book(lab, "partly").trials()][2:] == [
        ["user failure", "finished"]
    ] * 2


async def test_trials_are_compared_by_their_evaluators_and_chips_do_not_wait_for_them(
    lab: Lab, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EVALUATE_FOLDER", str(tmp_path))
    gate, fail = tmp_path / "gate", tmp_path / "fail"
    gate.touch()
    fail.touch()
    await pool.set(max_slices=1)
    base = lab.numpy_run(
        "scored", steps=10, every=10, evaluate="final", slice={"chips": 4},
        evaluate_command=[sys.executable, "-m", "tests.trainers.scorer"],
    )  # fmt: skip
    search = search_of(base, metric={"name": "evaluation/new.score"}, seeds=1)
    async with beside(sweep(run=base, search=search)) as task:
        await lab.until(lambda: len(book(lab, "scored").trials()) == 2, "the second trial has begun", task)
        first, second = book(lab, "scored").trials()
        await lab.until(lambda: lab.newest_step(second.run) == 10, "the second trial has been trained", task)
        assert (tmp_path / first.run).exists()
        assert not book(lab, "scored").outcomes()  # the first one is still being evaluated
        gate.unlink()
    assert (task.result()["finished"], task.result()["failed"]) == (0, 2)
    outcomes = book(lab, "scored").outcomes()
    assert all("out of memory, as it were" in outcome.reason for outcome in outcomes.values())
    # Trained they are: once more only the evaluation is made.
    fail.unlink()
    answer: Any = await sweep(run=base, search=search, rerun_failed=True)
    best = min((first, second), key=lambda one: int(one.run[-8:], 16))
    assert (answer["finished"], answer["best"]["run"]) == (2, best.run)
    assert answer["best"]["evaluation/new.score"] == int(best.run[-8:], 16)
    assert [lab.verdicts(one.run) for one in (first, second)] == [["finished"]] * 2
    lab.assert_nothing_left()


async def test_a_metric_that_is_never_logged_ends_the_sweep_with_the_first_trial(lab: Lab, pool: Pool):
    base = lab.numpy_run("blind", steps=10, every=10, slice={"chips": 4})
    with pytest.raises(SweepError, match="never logged 'accuracy'; it logged loss"):
        await sweep(run=base, search=search_of(base, metric={"name": "accuracy", "goal": "maximize"}))
    assert len(book(lab, "blind").trials()) <= 2
    lab.assert_nothing_left()


async def test_a_sweep_on_a_schedule_is_a_new_one_each_time_named_by_when_it_was_scheduled(lab: Lab):
    run = lab.numpy_run("nights", steps=10, every=10, slice={"chips": 1})
    values = {
        "run": run.model_dump(mode="json", exclude_unset=True),
        "search": {"parameters": {}, "seeds": [3]},
    }
    async with get_client() as client:
        flow_id = await client.create_flow(sweep)
        deployment = await client.create_deployment(
            flow_id, "nights", parameters=values, schedules=[soon_and_again(every_s=3)]
        )
        fired_runs = await until_fired(deployment, 2)
        # What a worker does, in this process.
        for fired in fired_runs:
            await run_flow_async(
                sweep, flow_run=fired, parameters=sweep.validate_parameters(fired.parameters)
            )
        await client.pause_deployment(deployment)  # it would fire again and again
    names = [f"nights-{fired.expected_start_time:%y%m%d-%H%M%S}" for fired in fired_runs]
    assert objects.folders(f"{lab.emulator.env['TPU_RELAY_BUCKET']}/sweeps") == names
    trials = [book(lab, name).trials() for name in names]
    assert [len(each) for each in trials] == [1, 1]
    for (trial,) in trials:
        lab.assert_as_undisturbed(run.model_copy(update={"name": trial.run, "seed": 3}))


async def test_what_a_killed_sweep_leaves_is_ended_with_its_flow_run(lab: Lab, pool: Pool, tmp_path: Path):
    await pool.set(max_slices=1)
    base = lab.numpy_run("killed", steps=5000, every=10, step_s=0.1, slice={"chips": 2})
    space = {"parameters": {SIZES: {"values": ["64", "96"]}}}
    async with lab.cold_process(base, tmp_path, space) as process:
        await lab.until(lambda: len(book(lab, "killed").trials()) == 2, "both trials are begun")
        trials = book(lab, "killed").trials()
        await lab.until(lambda: all(lab.newest_step(t.run) >= 10 for t in trials), "both train")
        process.kill()
        await process.wait()
    seen = observe(lab.directory(trials[0].run))
    assert seen is not None
    flow_run = seen[0].owner.flow_run
    assert (
        await end_run_of(Connection.from_environment(), "killed", "another flow run")
        == "nothing is left of the sweep killed"
    )
    assert len(lab.ready_nodes()) == 1
    told = await end_run_of(Connection.from_environment(), "killed", flow_run)
    assert told == "nothing is left of the sweep killed; 2 trial(s) were ended"
    lab.assert_nothing_left()
