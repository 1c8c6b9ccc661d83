"""SIGKILL of each part in the middle of a save: never a lost commit, never a partial restore, the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.scenarios.conftest import Lab
from tpu.checkpoint import files
from tpu.runs.config import RunConfig
from tpu.runs.evaluation import load_evaluation

TRAINER = "numpy_trainer"
# 16 MB a checkpoint, so that a save lasts a little.
LARGE = {"NUMPY_ARRAYS": "4", "NUMPY_SIZE": "500000"}


def large_run(lab: Lab, name: str, **values: object) -> RunConfig:
    return lab.numpy_run(name, steps=15, every=3, step_s=0.05, variables=LARGE, **values)


@contextlib.asynccontextmanager
async def frozen_in_save(lab: Lab, run: RunConfig) -> AsyncIterator[tuple[int, list[int]]]:
    """The trainer stands still (SIGSTOP) in the middle of a save: parts are in the bucket, the commit is not made.

    Gives the step that is being saved and the trainer's processes. A save that was over too soon is let go.
    """
    folder = f"{lab.directory(run.name)}/checkpoints"

    def being_saved() -> int | None:
        written = {int(url.removeprefix(folder + "/").split("/")[0]) for url in files.names(folder)}
        return max((step for step in written if step > lab.newest_step(run.name)), default=None)

    while True:
        await lab.until(lambda: lab.newest_step(run.name) > 0 and being_saved(), "a save")
        with lab.frozen(TRAINER) as pids:
            if pids and (step := being_saved()) is not None:
                yield step, pids
                return
            assert lab.newest_step(run.name) < run.steps, "no save was met"


async def kill_trainer(lab: Lab, pids: list[int]) -> None:
    lab.kill(pids)


async def kill_supervisor(lab: Lab, pids: list[int]) -> None:
    lab.kill(lab.pids("supervisor-", " start "))


async def kill_ssh(lab: Lab, pids: list[int]) -> None:
    await asyncio.to_thread(lab.emulator.kill_ssh, lab.ready_nodes()[0])


async def kill_host(lab: Lab, pids: list[int]) -> None:
    await asyncio.to_thread(lab.emulator.kill_host, lab.ready_nodes()[0])


@pytest.mark.parametrize(
    ("kill", "attempts", "slices"),
    [
        (kill_trainer, 2, 1),
        pytest.param(kill_supervisor, 2, 2, marks=pytest.mark.slow),
        pytest.param(kill_ssh, 1, 1, marks=pytest.mark.slow),
        pytest.param(kill_host, 2, 2, marks=pytest.mark.slow),
    ],
)
async def test_a_kill_in_the_middle_of_a_save_costs_no_commit_and_no_bit(
    lab: Lab, kill: Callable[[Lab, list[int]], Awaitable[None]], attempts: int, slices: int
):
    run = large_run(lab, kill.__name__.replace("_", "-"), budget={"user_failure": 0})
    async with lab.training(run) as task, frozen_in_save(lab, run) as (step, pids):
        before = lab.fence(run.name).commits
        await kill(lab, pids)
        if attempts > 1:
            await lab.until(lambda: not set(pids) & set(lab.pids(TRAINER)), "the trainer's end", task)
    commits = lab.fence(run.name).commits
    assert commits[: len(before)] == before
    assert len(lab.events(run.name, "attempt-started")) == attempts
    assert len(lab.events(run.name, "slice-ready")) == slices
    assert lab.verdicts(run.name) == ["infrastructure"] * (attempts - 1) + ["finished"]
    if attempts > 1:
        assert lab.events(run.name, "attempt-started")[1].detail["resume"] == before[-1].step < step
    lab.assert_as_undisturbed(run)


def evaluators(hold: Path) -> list[int]:
    """Processes of this machine that evaluate for this test."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"tests.trainers.evaluator" in (process / "cmdline").read_bytes():
                found += (
                    [int(process.name)] if str(hold).encode() in (process / "environ").read_bytes() else []
                )
    return found


@pytest.mark.slow  # in short form: test_kill_each_step.py, saving
async def test_O1_the_flow_is_killed_in_the_middle_of_a_save_and_started_again(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("EVALUATED", str(tmp_path / "evaluated"))
    monkeypatch.setenv("HOLD", str(hold))
    # A child of the command, as a shell script's programs are.
    script = f"{sys.executable} -m tests.trainers.evaluator & wait $!"
    run = large_run(lab, "kill-flow", evaluate="commits", evaluate_command=["/bin/sh", "-c", script])
    async with lab.flow_process(run, tmp_path) as flow:
        await lab.until(lambda: evaluators(hold), "an evaluation")
        async with frozen_in_save(lab, run) as (_, pids):
            flow.kill()
            await flow.wait()
            # What it had started here, an evaluation that takes its time, goes with it.
            await lab.until(lambda: not evaluators(hold), "the end of its evaluation")
            hold.unlink()
        # The gang goes on by itself.
        before = lab.newest_step(run.name)
        await lab.until(lambda: lab.newest_step(run.name) > before, "another commit")
    assert set(pids) & set(lab.pids(TRAINER)) or lab.newest_step(run.name) == run.steps
    report = await lab.train(run)
    # The same gang was taken up: nothing was started, trained or evaluated twice.
    assert (report["verdict"], report["attempts"]) == ("finished", 1)
    assert len(lab.events(run.name, "attempt-started")) == len(lab.events(run.name, "slice-ready")) == 1
    steps = [3, 6, 9, 12, 15]
    assert [(c.step, c.attempt) for c in lab.fence(run.name).commits] == [(step, 1) for step in steps]
    assert all(load_evaluation(lab.directory(run.name), step) for step in steps)
    lab.assert_as_undisturbed(run)
