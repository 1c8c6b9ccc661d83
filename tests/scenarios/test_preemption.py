"""Preemptions of every kind through the whole flow: what they cost, who is blamed, and what is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import SLOW_AT_FIRST, STAYS, Lab
from tests.scenarios.prefect_record import log_with
from tests.trainers.gate import Gate
from tpu.checkpoint import files
from tpu.runs.config import RunConfig
from tpu.runs.evaluation import load_evaluation
from tpu.runs.event_log import RunEvent

TRAINER = "numpy_trainer"


def resumed(lab: Lab, run: RunConfig) -> list[int]:
    """The steps at which the attempts began."""
    return [event.detail["resume"] or 0 for event in lab.events(run.name, "attempt-started")]


def names_in_order(lab: Lab, run: RunConfig, *kinds: str) -> list[str]:
    """`intended 1`, `deleted 1` …: what became of the slices of a run, in order."""
    numbers: dict[str, int] = {}
    told = []
    for event in lab.events(run.name):
        if event.kind in kinds:
            number = numbers.setdefault(event.detail["slice"], len(numbers) + 1)
            told.append(f"{event.kind.removeprefix('slice-')} {number}")
    return told


@pytest.mark.parametrize(
    "states", [("TERMINATED", "gone"), pytest.param(("STOPPED", "UNKNOWN"), marks=pytest.mark.slow)]
)
async def test_P1_a_spot_node_in_any_other_state_than_ready_is_preempted(lab: Lab, states: tuple[str, ...]):
    async def train_and_show(state: str) -> None:
        run = lab.numpy_run(f"odd-{state.lower()}", steps=40, variables=STAYS)
        async with lab.training(run) as task:
            await lab.until_step(run.name, 20, task)
            await lab.preempt(run, state=state)
        assert lab.verdicts(run.name) == ["preempted", "finished"], state
        # The old slice is gone before a new one is asked for, so that two never count against the quota.
        assert names_in_order(lab, run, "slice-intended", "slice-deleted") == [
            "intended 1", "deleted 1", "intended 2", "deleted 2"]  # fmt: skip
        lab.assert_as_undisturbed(run)

    await asyncio.gather(*map(train_and_show, states))


async def test_P2_preempted_while_being_created_it_is_made_again(lab: Lab):
    lab.emulator.set_capacity("us-central2-b", "v4-8", 1)
    lab.emulator.set_delay(60)
    run = lab.numpy_run("unborn", steps=20)
    seen: set[str] = set()
    async with lab.training(run) as task:
        for delay_of_the_next_s in (60, 0):
            (node,) = await lab.until(lambda: set(lab.nodes_in("CREATING")) - seen, "one in creation", task)
            seen.add(node)
            lab.emulator.set_delay(delay_of_the_next_s)
            await asyncio.to_thread(lab.emulator.preempt, node)
    assert lab.verdicts(run.name) == ["preempted", "preempted", "finished"]
    assert names_in_order(lab, run, "slice-intended", "slice-deleted") == [
        "intended 1", "deleted 1", "intended 2", "deleted 2", "intended 3", "deleted 3"]  # fmt: skip
    lab.assert_as_undisturbed(run)


async def test_P3_one_host_dies_the_whole_slice_is_replaced(lab: Lab):
    run = lab.numpy_run("one-host", steps=40, variables=STAYS, slice={"accelerator_type": "v4-16"})
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        await asyncio.to_thread(lab.emulator.kill_host, node, 1)
    ended, finished = lab.events(run.name, "attempt-ended")
    assert (ended.detail["verdict"], finished.detail["verdict"]) == ("infrastructure", "finished")
    assert f"{node}-w1 was lost" in ended.detail["reason"]
    assert finished.detail["slice"] != node
    assert resumed(lab, run) == [0, 20]
    lab.assert_as_undisturbed(run)


async def test_P4_preempted_before_the_program_runs_it_is_not_to_blame(lab: Lab):
    async def train_and_preempt(moment: str) -> None:
        run = lab.numpy_run(f"early-{moment}", steps=20, budget={"user_failure": 0, "infrastructure": 0})
        async with lab.training(run) as task:
            await lab.until(lambda: lab.events(run.name, f"{moment}-started"), f"its {moment}", task)
            await lab.preempt(run)
        assert lab.verdicts(run.name) == ["preempted", "finished"], moment
        lab.assert_as_undisturbed(run)
        # It is told in a line: a traceback would send people to look for a mistake of their own.
        assert "Traceback" not in await log_with(run.name, "ended: finished")

    await asyncio.gather(*map(train_and_preempt, ("sync", "attempt")))


async def after_the_death_of_one_host(lab: Lab, shown: str) -> list[RunEvent]:
    """The end of each attempt, when the cloud shows `shown` of the slice whose first host died."""
    run = lab.numpy_run(
        f"survivor-{shown.lower()}",
        steps=40,
        variables=STAYS,
        command=[sys.executable, "-m", "tests.trainers.peers"],
        slice={"accelerator_type": "v4-16"},
        budget={"user_failure": 0},
    )
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        await asyncio.to_thread(lab.emulator.kill_host, node, 0)
        lab.emulator.set_node_state(node, shown)
    lab.assert_as_undisturbed(run)
    return lab.events(run.name, "attempt-ended")


async def test_P5_a_survivor_that_fails_by_its_peer_is_not_to_blame(lab: Lab):
    ends = await after_the_death_of_one_host(lab, "READY")
    assert [end.detail["verdict"] for end in ends] == ["infrastructure", "finished"]
    # The dead host is named, though the survivor's error came first; what both said is kept.
    evidence = ends[0].detail["evidence"]
    assert "w0 was lost" in ends[0].detail["reason"]
    assert any("w0: lost" in line for line in evidence)
    assert any("w1: exit code 1" in line and "Socket closed" in line for line in evidence)


@pytest.mark.slow
async def test_P5_nor_is_one_whose_peer_was_preempted(lab: Lab):
    ends = await after_the_death_of_one_host(lab, "PREEMPTED")
    assert [end.detail["verdict"] for end in ends] == ["preempted", "finished"]


async def test_P6_preempted_before_its_evaluation_a_checkpoint_is_evaluated_once(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluated, hold = tmp_path / "evaluated", tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("EVALUATED", str(evaluated))
    monkeypatch.setenv("HOLD", str(hold))
    run = lab.numpy_run("evaluated", steps=40, variables=STAYS, evaluate="commits",
                        evaluate_command=[sys.executable, "-m", "tests.trainers.evaluator"])  # fmt: skip
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        await lab.preempt()
        await lab.until(lambda: lab.verdicts(run.name), "the verdict", task)
        assert load_evaluation(lab.directory(run.name), 20) is None
        hold.unlink()
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    for step, attempt in ((20, 1), (40, 2)):
        checkpoint = f"{lab.directory(run.name)}/checkpoints/{step}/{attempt}"
        assert load_evaluation(lab.directory(run.name), step) == {"step": step, "checkpoint": checkpoint}
    assert sorted(evaluated.read_text().split()) == ["20", "40"]


def new_nodes(lab: Lab, old: list[str]) -> list[str]:
    return [node for node in lab.ready_nodes() if node not in old]


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
async def test_P7_many_preemptions_none_charged_none_from_the_start(lab: Lab, tmp_path: Path, count: int):
    """Every other slice comes as far as a commit; the others are taken as soon as they are ready."""
    gate = Gate(tmp_path / "gate", before=7)
    run = lab.numpy_run("unlucky", steps=5 * (count // 2) + 5, every=5, variables=gate.variables,
                        budget={"user_failure": 0, "infrastructure": 0})  # fmt: skip
    seen: list[str] = []
    async with lab.training(run) as task:
        for number in range(count):
            if number % 2:
                await lab.until_step(run.name, 5 * (number // 2 + 1), task)
            seen += await lab.until(lambda old=seen[-1:]: new_nodes(lab, old), "a new slice", task)
            await lab.preempt()
            gate.move(5 * ((number + 1) // 2 + 1) + 2)
    assert lab.verdicts(run.name) == ["preempted"] * count + ["finished"]
    began = resumed(lab, run)
    assert began == sorted(began)
    assert began[-1] == run.steps - 5
    lab.assert_as_undisturbed(run)


async def test_P8_after_a_notice_a_checkpoint_is_taken_and_no_step_is_lost(lab: Lab):
    run = lab.numpy_run("noticed", steps=125, every=25, step_s=0.1, variables=SLOW_AT_FIRST)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 25, task)
        await lab.preempt(notice=True)
    first, last = lab.events(run.name, "attempt-ended")
    assert (first.detail["verdict"], last.detail["verdict"]) == ("preempted", "finished")
    assert "notice" in first.detail["reason"]
    # Wherever it was, nothing was done twice.
    assert 25 < first.detail["last_commit"] < run.steps
    assert first.detail["reached"] == first.detail["last_commit"] == resumed(lab, run)[1]
    assert task.result()["seconds"]["wasted"] == 0
    lab.assert_as_undisturbed(run)


async def test_P9_what_a_zombie_writes_is_refused_and_it_is_dead_before_the_next_begins(
    lab: Lab, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=25)
    run = lab.numpy_run("zombie", steps=40, variables=gate.variables)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        with lab.frozen(TRAINER) as zombies:
            assert zombies
            # The cloud says that it is gone, and neither ends it nor lets it be deleted for a while.
            lab.emulator.fail_next("DeleteQueuedResource", "UNAVAILABLE", "try again", times=6)
            await lab.preempt(linger_s=120)
            await lab.until(lambda: lab.verdicts(run.name), "the verdict", task)
            gate.open()
        # Its attempt is closed. It goes on, and saves the next checkpoint with everything that belongs to it.
        folder = f"{lab.directory(run.name)}/checkpoints/40/1"
        await lab.until(lambda: f"{folder}/manifest.json" in files.names(folder), "what it wrote", task)
        assert len(lab.events(run.name, "attempt-started")) == 1
        started = await lab.until(
            lambda: lab.events(run.name, "attempt-started")[1:], "the next attempt", task
        )
        assert started
        assert not set(zombies) & set(lab.pids(TRAINER))
    assert lab.verdicts(run.name) == ["preempted", "finished"]
    assert [(c.step, c.attempt) for c in lab.fence(run.name).commits] == [(20, 1), (40, 2)]
    lab.assert_as_undisturbed(run)


async def test_the_report_of_a_disturbed_run_tells_every_attempt_and_every_second(lab: Lab):
    run = lab.numpy_run("told", steps=40, variables=STAYS)
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        await lab.preempt()
    report = task.result()
    began, ended = (lab.events(run.name)[i].time for i in (0, -1))
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"])
    assert report["wall_s"] == pytest.approx(ended - began, abs=3)
    text = files.read(f"{lab.directory(run.name)}/report/report.md").decode()
    for event in lab.events(run.name, "attempt-ended"):
        assert_told(text, event)
    assert report["parameters_sha256"] in text


def assert_told(text: str, event: RunEvent) -> None:
    assert event.detail["verdict"] in text
    assert event.detail["reason"] in text or event.detail["verdict"] == "finished"
