"""C keys through the whole flow: damaged, partial and refused checkpoints, clocks, names and controllers."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from tests.checkpoint.test_kill import assert_undisturbed
from tests.scenarios.conftest import Lab, beside
from tests.scenarios.prefect_record import flow_runs, log_with, until_task_runs
from tests.trainers.gate import Gate
from tpu.checkpoint import files, objects
from tpu.checkpoint.restore import restore
from tpu.clock import SystemClock
from tpu.cloud import CloudError
from tpu.runs.controller import BEAT_S, MISSED, ControllerLost, Owner, RunIsDriven, observe, this_process
from tpu.runs.driver import AttemptEnded
from tpu.runs.opening import become_controller
from tpu.runs.record import RunNameTaken

HANG = {"NUMPY_FAIL_ATTEMPT": "1"}


def contents(lab: Lab, name: str) -> dict[str, int]:
    """Every object of a run and its generation: equal before and after if nothing was written."""
    found = {url: objects.read(url) for url in sorted(files.names(lab.directory(name)))}
    return {url: object_[1] for url, object_ in found.items() if object_}


async def test_C2_damage_between_attempts_the_one_before_is_used(lab: Lab):
    run = lab.numpy_run("damaged", variables=HANG | {"NUMPY_FAIL": "hang@45"})
    async with lab.training(run) as task:
        await lab.until_step(run.name, 40, task)
        damaged = f"{lab.directory(run.name)}/checkpoints/40/1/shards-0-0.safetensors"
        data = files.read(damaged)
        files.write(damaged, data[:-1] + bytes([data[-1] ^ 1]))
        await lab.preempt()
    await log_with(run.name, "checkpoint of step 40 (attempt 1) is not used", "restored step 20")
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    # What the report tells is where the attempt really began.
    assert [event.detail["resume"] for event in lab.events(run.name, "attempt-ended")] == [0, 20]
    restored = restore(lab.directory(run.name), lab.fence(run.name))
    assert restored is not None
    assert restored.step == run.steps
    assert_undisturbed(restored.arrays, run.steps, seed=0)
    named = [f"segment {n}: steps {20 * n - 20}-{20 * n}, attempt {a}" for n, a in ((1, 1), (2, 1), (3, 2))]
    await until_task_runs(run.name, *named)


async def test_C3_only_incomplete_checkpoints_means_step_0_and_says_so(lab: Lab):
    run = lab.numpy_run("incomplete", steps=40, variables=HANG | {"NUMPY_FAIL": "hang@10"})
    async with lab.training(run) as task:
        await lab.until(lambda: lab.events(run.name, "attempt-started"), "the first attempt", task)
        folder = f"{lab.directory(run.name)}/checkpoints/20/1"
        for part in ("shards-0-0.safetensors", "host-0.json", "manifest.json"):
            files.write(f"{folder}/{part}", b"{}")  # written, but named by no fence
        await lab.preempt()
    await log_with(run.name, "beginning at step 0")
    assert [(c.step, c.attempt) for c in lab.fence(run.name).commits] == [(20, 2), (40, 2)]
    lab.assert_as_undisturbed(run)


async def test_C4_a_host_an_hour_behind_neither_reorders_commits_nor_bends_the_report(lab: Lab):
    behind = (
        "import os, runpy, time; real = time.time; late = 3600 * int(os.environ['RELAY_ATTEMPT']); "
        "time.time = lambda: real() - late; runpy.run_module('tests.trainers.numpy_trainer', run_name='__main__')"
    )
    run = lab.numpy_run("clocks", steps=40, command=[sys.executable, "-c", behind],
                        variables=HANG | {"NUMPY_FAIL": "hang@30"})  # fmt: skip
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        await lab.preempt()
    report = task.result()
    assert [(c.step, c.attempt) for c in lab.fence(run.name).commits] == [(20, 1), (40, 2)]
    assert report["wall_s"] < 120
    assert report["seconds"]["step"] > 0
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"])
    lab.assert_as_undisturbed(run)


async def test_C5_the_same_name_with_other_numbers_is_refused_before_anything_is_made(lab: Lab):
    run = lab.numpy_run("taken", steps=20)
    await lab.train(run)
    before = contents(lab, run.name)
    for other, difference in (
        (lab.numpy_run("taken", steps=20, seed=4), "seed: 0 → 4"),
        (lab.numpy_run("taken", steps=20, slice={"accelerator_type": "v4-16"}), '"v4-8" → "v4-16"'),
        (lab.numpy_run("taken", steps=21), "has 20 steps, not 21"),
    ):
        with pytest.raises(RunNameTaken, match="nothing was changed") as refused:
            await lab.train(other)
        assert difference in str(refused.value)
    assert contents(lab, run.name) == before
    await log_with(run.name, "seed: 0 → 4")


async def test_C5_a_run_that_never_began_takes_another_configuration_under_its_name(lab: Lab):
    with pytest.raises(CloudError):
        await lab.train(lab.numpy_run("corrected", steps=20, slice={"zone": "us-east5-z"}))
    run = lab.numpy_run("corrected", steps=40)
    assert (await lab.train(run))["verdict"] == "finished"
    await log_with(
        run.name, 'corrected never began, so it takes another configuration: slice.zone: "us-east5-z" →'
    )
    lab.assert_as_undisturbed(run)


async def test_C6_the_second_is_refused_and_take_over_wins_without_touching_the_gang(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=15)
    run = lab.numpy_run("twice", steps=30, every=10, variables=gate.variables)
    first = asyncio.create_task(lab.train(run))
    await lab.until_step(run.name, 10, first)
    with pytest.raises(RunIsDriven, match="nothing was changed"):
        await lab.train(run)
    assert not first.done()
    async with beside(lab.train(run, take_over=True)) as second:
        with pytest.raises(ControllerLost):
            await first
        gate.open()
    report = second.result()
    # The gang was never ended: one attempt, all bits.
    assert (report["verdict"], report["attempts"]) == ("finished", 1)
    deleted = [event.detail["why"] for event in lab.events(run.name, "slice-deleted")]
    assert deleted == ["training is done"]
    lab.assert_as_undisturbed(run)


class JumpingClock(SystemClock):
    """A clock on which waiting takes no time."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def monotonic(self) -> float:
        return self.waited_s

    async def sleep(self, seconds: float) -> None:
        self.waited_s += seconds


async def test_C6_who_may_take_a_run_from_whom(lab: Lab):
    run_dir, clock, said = lab.directory("owners"), JumpingClock(), []
    mine = this_process("flow-1")
    elsewhere = dataclasses.replace(mine, host="another-machine")

    async def become(owner: Owner, take_over: bool = False) -> int:
        return (await become_controller(run_dir, owner, take_over, clock, said.append)).term

    assert await become(elsewhere) == 1
    # The same flow run, started again somewhere else: at once.
    assert await become(mine) == 2
    assert clock.waited_s == 0
    # Another flow run of this machine whose process is gone: at once.
    seen = observe(run_dir)
    assert seen is not None
    gone = dataclasses.replace(seen[0], owner=dataclasses.replace(mine, started="0/0"))
    objects.compare_and_set(f"{run_dir}/controller.json", gone.to_json(), seen[1])
    other = dataclasses.replace(elsewhere, flow_run="flow-2")
    assert await become(other) == 3
    assert clock.waited_s == 0
    # From a machine that cannot be asked: after it has been silent for its time, or by request.
    assert await become(dataclasses.replace(mine, flow_run="flow-3")) == 4
    assert clock.waited_s >= MISSED * BEAT_S
    assert await become(dataclasses.replace(mine, flow_run="flow-4"), take_over=True) == 5
    assert "taken over by request" in said[-1]


@pytest.mark.parametrize("kind", ["nan", "nanstate"])
async def test_C10_nan_stops_the_run_at_once_and_keeps_the_last_good_checkpoint(lab: Lab, kind: str):
    log_every = "1" if kind == "nan" else "1000"
    run = lab.numpy_run(
        f"diverges-{kind}", variables={"NUMPY_FAIL": f"{kind}@25", "NUMPY_LOG_EVERY": log_every}
    )
    with pytest.raises(AttemptEnded, match=r"training diverged.*last good checkpoint is kept"):
        await lab.train(run)
    assert lab.verdicts(run.name) == ["user failure"]
    assert lab.newest_step(run.name) == 20
    (flow_run,) = await flow_runs(run.name)
    assert flow_run.state is not None
    assert flow_run.state.is_failed()
    await log_with(run.name, "training diverged", "DivergedError")
