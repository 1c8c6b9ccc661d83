"""The reaper through its flow: what a flow left that nobody started again, and money that is spent."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from pathlib import Path

import pytest
from prefect.exceptions import CancelledRun

from flows.reap import reap
from tasks.fleet import fleet_key
from tests.scenarios.conftest import SLOW_AT_FIRST, Lab
from tests.scenarios.prefect_record import artifacts, flow_runs, log_with
from tests.scenarios.terminal import started
from tests.trainers.gate import Gate
from tpu.checkpoint import files
from tpu.runs.config import RunConfig
from tpu.runs.ledger import make_sum
from tpu.runs.record import RunNameTaken, set_max_cost

# So long a silent holder is watched here; a minute elsewhere.
WATCH_S = 3.0


def configuration(folder: Path, run: RunConfig) -> str:
    file = folder / f"{run.name}.yaml"
    file.write_text(run.model_dump_json())  # JSON is YAML
    return str(file)


async def test_O1_a_flow_that_is_killed_and_never_started_again_leaks_no_slice(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tasks.reap.WATCH_S", WATCH_S)
    priced = {"accelerator_type": "v4-8", "price_an_hour": 3.6}
    run = lab.numpy_run("left-behind", steps=600, every=10, step_s=0.05, slice=priced)
    async with started(tmp_path, configuration(tmp_path, run)) as flow:
        await lab.until_step(run.name, 10)
        flow.signal(signal.SIGKILL)
        await flow.exit_code()
    (slice_name,) = lab.ready_nodes()
    dry = await reap(dry_run=True)
    assert (dry["to_delete"], lab.ready_nodes()) == ([slice_name], [slice_name])
    done = await reap()
    assert done["deleted"] == [slice_name]
    lab.assert_nothing_left()
    assert [one for one in await artifacts() if one.key == "reaper" and slice_name in str(one.data)]
    # The table of the fleet has one history; other tests tell theirs under the same key.
    key = fleet_key(lab.emulator.env["TPU_RELAY_BUCKET"])
    tables = [str(one.data) for one in await artifacts() if one.key == key]
    with_it = [number for number, table in enumerate(tables) if slice_name in table]
    assert any("no slices" in table for table in tables[with_it[-1] + 1 :])
    # From then on the run pays nothing, whenever it is looked at.
    events = lab.events(run.name)
    assert make_sum(events, time.time() + 3600).dollars == make_sum(events, time.time()).dollars
    # And it goes on as if nothing had happened.
    saved = lab.newest_step(run.name)
    shorter = lab.numpy_run("left-behind", steps=600, every=10, step_s=0.05, slice=priced)
    task = asyncio.create_task(lab.train(shorter))
    await lab.until_step(run.name, saved + 20, task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert lab.events(run.name, "attempt-started")[-1].detail["resume"] >= saved
    # What the gang did while nobody watched it is told by itself: nearly all of these steps are the first attempt's.
    figures = json.loads(files.read(f"{lab.directory(run.name)}/report/figures.json"))
    assert figures["seconds"]["step"] >= 0.05 * saved
    lab.assert_nothing_left()


async def test_a_run_that_has_spent_its_max_cost_saves_cleans_up_and_says_how_to_go_on(lab: Lab):
    # A cent a second: the limit comes a few seconds after the slice is ready.
    dear = {"accelerator_type": "v4-8", "price_an_hour": 36.0}
    run = lab.numpy_run("dear", steps=240, every=40, step_s=0.1, slice=dear, max_cost=0.1,
                        variables=SLOW_AT_FIRST)  # fmt: skip
    with pytest.raises(CancelledRun) as ended:
        await lab.train(run)
    assert re.fullmatch(
        r"max_cost of \$0\.1000 is reached \(\$0\.\d{4} spent\)\. To go on: relay extend dear --max-cost N, "
        r"then python -m flows\.train --resume dear",
        str(ended.value),
    )
    lab.assert_nothing_left()
    (flow_run,) = await flow_runs(run.name)
    assert flow_run.state is not None
    assert (flow_run.state.name, flow_run.state.type.value) == ("MaxCostReached", "CANCELLED")
    await log_with(run.name, "% of max_cost is spent", "of $0.1000 (max_cost)")
    assert lab.verdicts(run.name) == ["cancelled"]
    saved = lab.newest_step(run.name)
    assert saved > 0
    report = files.read(f"{lab.directory(run.name)}/report/report.md").decode()
    assert "of $0.1000 (max_cost)" in report
    # Started again without more money it ends at once, and nothing is made.
    with pytest.raises(CancelledRun, match="max_cost of"):
        await lab.train(run)
    assert len(lab.events(run.name, "slice-ready")) == 1
    # The same run with another limit is a question that a person answers.
    richer = run.model_copy(update={"max_cost": 5.0})
    with pytest.raises(RunNameTaken, match=r"relay extend dear --max-cost 5\.0"):
        await lab.train(richer)
    await asyncio.to_thread(set_max_cost, lab.directory(run.name), 5.0)
    await lab.train(richer)
    assert lab.events(run.name, "attempt-started")[-1].detail["resume"] == saved
    lab.assert_as_undisturbed(run)


async def test_O5_two_triggers_of_one_run_are_one_run_and_a_refusal(lab: Lab, tmp_path: Path):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("locked", steps=40, every=20, variables=gate.variables)
    async with lab.training(run) as first:
        await lab.until_step(run.name, 20, first)
        with pytest.raises(Exception, match=r"driven by|alive") as refused:
            await lab.train(run)
        assert not isinstance(refused.value, CancelledRun)
        gate.open()
    assert lab.verdicts(run.name) == ["finished"]
    assert len(lab.events(run.name, "slice-intended")) == 1
    lab.assert_as_undisturbed(run)
