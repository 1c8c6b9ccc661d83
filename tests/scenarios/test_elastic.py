"""Runs over several slices, mode elastic: a slice that is lost costs no step, and no number."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Lab
from tests.scenarios.prefect_record import log_with, until_task_runs
from tests.train.test_trainer import TINY_ICL
from tests.trainers.gate import Gate
from tests.trainers.units import alone
from tpu.checkpoint.restore import restore
from tpu.checkpoint.verify import verify_run
from tpu.connection import Connection
from tpu.elastic.place import look
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.driver import AttemptEnded
from tpu.runs.parts import part_name
from tpu.runs.stopping import stop_run

UNITS = 6
# So slow that a slice can come back before the end: tables reach 2 s ahead.
PACED = {"UNITS_SECONDS": "0.05"}


def elastic(
    lab: Lab, name: str, *, slices: int = 2, steps: int = 60, every: int = 20, **values: Any
) -> RunConfig:
    lab.take_name(name)
    settings = {"units": UNITS, "compare_every": 10} | values.pop("elastic", {})
    return parse_run_config(
        {
            "name": name,
            "command": [sys.executable, "-m", "tests.trainers.units"],
            "contract": True,
            "mode": "elastic",
            "slices": slices,
            "elastic": settings,
            "steps": steps,
            "checkpoints": {"every": every},
            "evaluate": "never",
        }
        | values
    )


def assert_as_alone(lab: Lab, run: RunConfig) -> None:
    """Every array of the last checkpoint, and every loss, has the bits of one program that nobody disturbed."""
    state, losses = alone(UNITS, run.steps)
    restored = restore(lab.directory(run.name), lab.fence(run.name))
    assert restored is not None
    assert restored.step == run.steps
    assert restored.arrays.keys() == state.keys()
    for name, whole in state.items():
        assert restored.arrays[name].tobytes() == whole.tobytes(), name
    assert lab.losses(run.name) == losses
    assert all(verdict.whole for verdict in verify_run(lab.directory(run.name)))


def node_of(lab: Lab, run: RunConfig, number: int) -> str:
    (node,) = [node for node in lab.ready_nodes() if node.startswith(f"relay-{part_name(run.name, number)}-")]
    return node


def reached(lab: Lab, run: RunConfig, number: int) -> list[tuple[int, int]]:
    """(from, to) of each time that a slice took part."""
    return [
        (event.detail["resume"], event.detail["reached"])
        for event in lab.events(part_name(run.name, number), "attempt-ended")
    ]


def coordinator_of(lab: Lab, run: RunConfig) -> int:
    """Number of the slice on whose host the coordinator is."""
    found = look(lab.directory(run.name))
    assert found is not None
    hosts = {node["node"]: [host["address"] for host in node["hosts"]] for node in lab.emulator.nodes()}
    return next(n for n in range(run.slices) if found[0].host in hosts[node_of(lab, run, n)])


async def taking_part_again(run: RunConfig, number: int) -> None:
    """Return once the log tells so a second time."""
    said = f"slice{number} takes part from step"
    async with asyncio.timeout(60):
        while (await log_with(run.name, said)).count(said) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # asks the Prefect server anew


@contextlib.contextmanager
def frozen(lab: Lab, node: str) -> Iterator[list[int]]:
    """Stop the programs on a node where they stand for the block."""
    pids = [pid for pid in lab.pids("tests.trainers.units") if node in os.readlink(f"/proc/{pid}/cwd")]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def saver_of(run: RunConfig) -> int:
    """Number of the slice that saves, of two."""
    log = await log_with(run.name, "saves the run's checkpoints")
    return next(n for n in (0, 1) if f"slice{n} saves the run's checkpoints" in log)


async def test_P1_a_slice_that_is_taken_costs_no_step_and_no_bit_even_that_of_the_coordinator(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=30)
    run = elastic(lab, "elastic-loss", variables=gate.variables)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        lost = coordinator_of(lab, run)
        node = node_of(lab, run, lost)
        await asyncio.to_thread(lab.emulator.preempt, node, notice=False, state="TERMINATED")
        gate.open()
    assert task.result()["verdict"] == "finished"
    assert_as_alone(lab, run)
    # The other one went on where it was; the lost slice was had again, on another node.
    assert reached(lab, run, 1 - lost) == [(0, 60)]
    assert lab.verdicts(part_name(run.name, lost))[0] == "preempted"
    assert lab.verdicts(part_name(run.name, 1 - lost)) == ["finished"]
    first, step = reached(lab, run, lost)[0]
    assert first == 0
    assert 20 <= step <= 31
    await until_task_runs(
        run.name,
        f"slice{1 - lost}: steps 0–60",
        f"slice{lost}: steps 0–{step}, preempted",
        "segment 3: steps 40-60",
    )


async def test_G4_nothing_starts_before_all_are_there_and_all_gone_it_goes_on_from_the_last_commit(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = elastic(lab, "elastic-gone", variables=gate.variables)
    lab.emulator.set_capacity("us-central2-b", "v4-8", 1)
    async with lab.training(run) as task:
        await log_with(run.name, "1 of 2 members missing: slice")
        assert not [n for n in (0, 1) if reached(lab, run, n)]
        assert lab.newest_step(run.name) == 0
        lab.emulator.set_capacity("us-central2-b", "v4-8", 2)
        await lab.until_step(run.name, 20, task)
        nodes = [node_of(lab, run, number) for number in (0, 1)]
        await asyncio.gather(*(asyncio.to_thread(lab.emulator.preempt, node, notice=False) for node in nodes))
        await lab.until(
            lambda: all(lab.verdicts(part_name(run.name, n)) == ["preempted"] for n in (0, 1)), "both", task
        )
        gate.open()
    assert_as_alone(lab, run)
    assert [reached(lab, run, n)[1] for n in (0, 1)] == [(20, 60), (20, 60)]
    assert [commit.step for commit in lab.fence(run.name).commits] == [20, 40, 60]


@pytest.mark.slow  # the suite has the loss of one of two above
async def test_P3_two_of_three_slices_are_lost_and_had_again_and_the_bits_are_those_of_one_slice_alone(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=45)
    run = elastic(lab, "elastic-three", slices=3, steps=200, variables=PACED | gate.variables)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        await asyncio.to_thread(lab.emulator.kill_host, node_of(lab, run, 2), 0)
        lost = part_name(run.name, 2)
        await lab.until(lambda: len(lab.events(lost, "attempt-started")) == 2, "it is had again", task)
        gate.open()
        await taking_part_again(run, 2)
        await asyncio.to_thread(lab.emulator.preempt, node_of(lab, run, 0), state="STOPPED")
        await taking_part_again(run, 0)
    assert_as_alone(lab, run)
    assert reached(lab, run, 1) == [(0, 200)]
    assert lab.verdicts(part_name(run.name, 2)) == ["infrastructure", "finished"]
    assert lab.verdicts(part_name(run.name, 0)) == ["preempted", "finished"]
    for number in (0, 2):
        (begin, until), (again, end) = reached(lab, run, number)
        assert begin < until < again < end == 200
    single = elastic(lab, "elastic-one", slices=1, steps=200)
    await lab.train(single)
    assert (lab.digest(run.name), lab.losses(run.name)) == (lab.digest(single.name), lab.losses(single.name))


@pytest.mark.slow  # waits for time-outs; tests/elastic has a member that hangs
async def test_G8_a_slice_that_hangs_is_given_up_by_the_others_and_replaced(lab: Lab):
    run = elastic(
        lab, "elastic-hang", steps=60, progress_minutes=0.2,
        variables={"UNITS_FAIL": "slice1:hang@25", "UNITS_SECONDS": "0.02"},
    )  # fmt: skip
    await lab.train(run)
    assert_as_alone(lab, run)
    assert reached(lab, run, 0) == [(0, 60)]
    hung = lab.events(part_name(run.name, 1), "attempt-ended")[0]
    assert hung.detail["verdict"] in ("infrastructure", "cancelled")
    await log_with(run.name, "is out at step 25: others have waited for it")


@pytest.mark.slow  # waits for time-outs; tests/elastic/test_saving.py has what is refused
async def test_P9_a_slice_that_lives_on_after_its_preemption_changes_nothing(lab: Lab, tmp_path: Path):
    gate = Gate(tmp_path / "gate", before=30)
    run = elastic(lab, "elastic-zombie", steps=60, variables=gate.variables)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        lost = await saver_of(run)
        node = node_of(lab, run, lost)
        with frozen(lab, node) as zombies:
            lab.emulator.fail_next("DeleteQueuedResource", "UNAVAILABLE", "try again", times=6)
            await asyncio.to_thread(lab.emulator.preempt, node, linger_s=120)
            await lab.until(lambda: lab.verdicts(part_name(run.name, lost)), "the verdict", task)
            gate.open()
            await lab.until_step(run.name, 40, task)
    assert_as_alone(lab, run)
    commits = lab.fence(run.name).commits
    assert [commit.step for commit in commits] == [20, 40, 60]
    assert commits[0].attempt < commits[1].attempt == commits[2].attempt
    assert not set(zombies) & set(lab.emulator.processes())


@pytest.mark.slow
async def test_O1_a_flow_that_is_killed_stops_no_slice_and_is_taken_up_where_all_of_them_are(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = elastic(lab, "elastic-orphan", steps=60, variables=gate.variables)
    async with lab.flow_process(run, tmp_path) as flow:
        await lab.until_step(run.name, 20)
        pids = lab.pids("tests.trainers.units")
        flow.kill()
        await flow.wait()
    gate.move(45)
    await lab.until_step(run.name, 40)  # nobody drives the run
    assert sorted(lab.pids("tests.trainers.units")) == sorted(pids)
    async with lab.training(run):
        gate.open()
    assert_as_alone(lab, run)
    assert [lab.verdicts(part_name(run.name, n)) for n in (0, 1)] == [["finished"], ["finished"]]


@pytest.mark.slow
async def test_O4_a_run_that_is_stopped_saves_where_it_is_and_goes_on_from_there(lab: Lab):
    run = elastic(lab, "elastic-stop", steps=80, every=40, variables=PACED)
    task = asyncio.create_task(lab.train(run))
    await lab.until_step(run.name, 40, task)
    await asyncio.gather(
        stop_run(Connection.from_environment(), lab.directory(run.name), print), asyncio.wait({task})
    )
    lab.assert_nothing_left()
    assert 40 < lab.newest_step(run.name) < 80
    await lab.train(run)
    assert_as_alone(lab, run)


@pytest.mark.slow
async def test_O8_a_program_that_fails_everywhere_ends_the_run_with_what_it_said(lab: Lab):
    run = elastic(
        lab, "elastic-fails", variables={"UNITS_FAIL": "all:exception@25"}, budget={"user_failure": 1}
    )
    with pytest.raises(AttemptEnded, match="the user's code failed on demand at step 25"):
        await lab.train(run)
    assert lab.newest_step(run.name) == 20
    for number in (0, 1):
        assert lab.verdicts(part_name(run.name, number)) == ["user failure", "user failure"]


@pytest.mark.slow
async def test_C10_a_loss_that_is_no_number_ends_every_slice_at_once_and_keeps_the_last_good_checkpoint(
    lab: Lab,
):
    run = elastic(lab, "elastic-nan", variables={"UNITS_FAIL": "all:nan@25"})
    with pytest.raises(AttemptEnded, match="loss is nan at step 26"):
        await lab.train(run)
    assert lab.newest_step(run.name) == 20
    assert all(lab.verdicts(part_name(run.name, number)) == ["user failure"] for number in (0, 1))


@pytest.mark.slow  # starts JAX four times
async def test_the_built_in_training_has_the_same_bits_on_one_slice_and_on_two_of_which_one_is_preempted(
    lab: Lab,
):
    values: dict[str, Any] = {
        "command": None, "contract": False, "training": TINY_ICL | {"log_every": 10},
        "elastic": {"units": 4}, "every": 100, "steps": 400,
    }  # fmt: skip
    single, run = (elastic(lab, f"elastic-icl{n}", slices=n, **dict(values)) for n in (1, 2))
    await lab.train(single)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 100, task)
        await asyncio.to_thread(lab.emulator.preempt, node_of(lab, run, 1), notice=False)
    assert lab.verdicts(part_name(run.name, 1))[0] == "preempted"
    assert (lab.digest(run.name), lab.losses(run.name)) == (lab.digest(single.name), lab.losses(single.name))
    assert len(lab.losses(run.name)) == 40
