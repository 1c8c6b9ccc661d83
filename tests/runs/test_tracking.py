"""Metrics handed to Weights & Biases and to TensorBoard: each step once, whatever the run goes through."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import Track, until
from tests.runs.places import on_tensorboard, wandb_rows
from tests.trainers.gate import Gate
from tpu.checkpoint import objects
from tpu.checkpoint.fence import Commit, add_commit, close_attempt, open_attempt, update_fence
from tpu.runs.committed import CommittedRows
from tpu.runs.config import RunConfigError, Tracking, parse_run_config
from tpu.runs.controller import ControllerLost
from tpu.runs.driver import AttemptEnded
from tpu.runs.sink import numbers_of
from tpu.runs.tensorboard import TensorBoardFiles
from tpu.runs.tracker import Tracker, check_tracking, sinks_of
from tpu.runs.wandb_run import WandbRun, wandb_id
from tpu.runtime.metrics import MetricsWriter

BOTH = {"wandb": {"project": "tests"}, "tensorboard": True}


async def ours() -> None: ...


async def test_three_preemptions_are_one_run_with_every_step_once(
    track: Track, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(track.emulator.env, "TPU_RELAY_HOME", str(tmp_path / "home"))
    gate = Gate(tmp_path / "gate", before=25)
    run = track.numpy_run(
        "tracked", steps=80, every=20, tracking={"wandb": BOTH["wandb"]}, variables=gate.variables
    )
    said: list[str] = []
    async with track.driving(run, said.append) as driver:
        # Each time it is taken away behind a commit: the steps since are done again, and logged again.
        for stop in (20, 40, 60):
            await track.segment(driver, stop)
            (node,) = track.emulator.nodes()
            await asyncio.to_thread(track.emulator.preempt, node["name"].rpartition("/")[2], notice=False)
            with pytest.raises(AttemptEnded):
                await driver.wait_for_commit(80)
            gate.move(before=stop + 25)
        gate.open()
        await track.segment(driver, 80)
        await driver.clean_up("the test is done with it")
        record = driver.record
    assert track.fence("tracked").attempt == 4
    logged = track.losses("tracked")
    assert [step for step, _ in logged] == list(range(1, 81))
    run_dir = track.directory("tracked")
    assert wandb_rows(run_dir, record, tmp_path / "home") == logged
    # One run there, and its offline record lies in the bucket, for `wandb sync`.
    (kept,) = objects.listing(f"{run_dir}/wandb")
    assert kept.endswith(f"-{wandb_id(run_dir, record)}.wandb")
    # What is wanted by a later start gets all steps, and the other place none again.
    again = run.model_copy(update={"tracking": Tracking.model_validate(BOTH)})
    async with track.driving(again, said.append):
        pass
    assert on_tensorboard(run_dir) == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged]
    assert wandb_rows(run_dir, record, tmp_path / "home") == logged
    assert not [line for line in said if "not handed" in line]


class Story:
    """A run that nobody trains: the test says what its attempts log and commit."""

    def __init__(self, track: Track, name: str, **values: Any) -> None:
        self.record = track.record(name, **values)
        self.run_dir = track.directory(name)
        self.attempt = 0
        self._writer: MetricsWriter | None = None

    def begin(self) -> None:
        self.attempt += 1
        self._writer = MetricsWriter(self.run_dir, self.attempt)
        update_fence(self.run_dir, lambda fence: open_attempt(fence, self.attempt))

    def log(self, start: int, stop: int) -> None:
        assert self._writer is not None
        for step in range(start, stop):
            self._writer.add({"step": step, "loss": 1 / step, "t": 1.7e9 + step, "where": "a word"})
        self._writer.flush()

    def commit(self, step: int) -> None:
        update_fence(self.run_dir, lambda fence: add_commit(fence, Commit(step, self.attempt, "AAAAAA==")))

    def end(self) -> None:
        update_fence(self.run_dir, close_attempt)


async def test_what_a_killed_flow_left_is_handed_on_by_the_next_one_on_any_machine(
    track: Track, tmp_path: Path
):
    story = Story(track, "handed", tracking=BOTH)
    said: list[str] = []

    def tracker(machine: str) -> Tracker:
        sinks = sinks_of(story.record.config.tracking, story.record, story.run_dir, None, tmp_path / machine)
        return Tracker(story.record, story.run_dir, sinks, ours, said.append)

    story.begin()
    story.log(1, 8)
    story.commit(5)
    async with tracker("one"):
        await until(lambda: len(on_tensorboard(story.run_dir)) == 5, "the first commit on TensorBoard")
        story.log(8, 11)
        story.end()
    story.begin()
    story.log(6, 13)
    story.commit(12)
    for machine in ("two", "two"):  # the second start has nothing to add
        async with tracker(machine):
            pass
    assert not said
    steps = list(range(1, 13))
    assert [step for step, _ in on_tensorboard(story.run_dir)] == steps
    assert [step for step, _ in wandb_rows(story.run_dir, story.record, tmp_path / "two")] == steps
    assert len(objects.listing(f"{story.run_dir}/wandb")) == 2


def test_records_of_two_processes_that_begin_in_one_second_are_two(track: Track, tmp_path: Path):
    for name in ("once", "twice", "thrice"):  # seconds may change between two of them, but not each time
        story = Story(track, name, tracking=BOTH)
        settings = story.record.config.tracking.wandb
        assert settings is not None
        for step in (1, 2):
            wandb = WandbRun(story.run_dir, story.record, settings, None, tmp_path / f"{name}-{step}")
            assert wandb.last() == step - 1
            wandb.write([{"step": step, "loss": 0.5}])
            wandb.close(ended_well=True)
        assert wandb_rows(story.run_dir, story.record, tmp_path / f"{name}-2") == [(1, 0.5), (2, 0.5)]


class Full:
    """A place that takes nothing while it is `broken`."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.broken = True
        self.ended_well: bool | None = None

    def last(self) -> int:
        return max(self.got, default=0)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.broken:
            raise OSError("no space left")
        self.got += [row["step"] for row in rows]

    def close(self, ended_well: bool) -> None:
        self.ended_well = ended_well


async def test_trouble_with_a_place_is_said_once_and_the_next_commit_tries_again(track: Track):
    story, full, said = Story(track, "troubled", steps=10), Full(), list[str]()
    story.begin()
    story.log(1, 4)
    story.commit(3)
    async with Tracker(story.record, story.run_dir, {"a full place": full}, ours, said.append):
        await until(lambda: said, "the complaint")
        story.log(4, 6)
        story.commit(5)
        full.broken = False
    assert len(said) == 1
    assert said[0].startswith("metrics were not handed to a full place")
    assert "no space left" in said[0]
    assert (full.got, full.ended_well) == ([1, 2, 3, 4, 5], False)


async def test_a_run_that_is_another_processs_by_now_is_handed_on_by_that_one(track: Track):
    story, place = Story(track, "lost"), Full()
    place.broken = False

    async def taken() -> None:
        raise ControllerLost("another process drives it", None)

    async with Tracker(story.record, story.run_dir, {"a place": place}, taken, pytest.fail):
        story.begin()
        story.log(1, 4)
        story.commit(3)
    assert (place.got, place.ended_well) == ([], False)


def test_committed_rows_are_each_given_once_and_none_before_its_commit(track: Track):
    story = Story(track, "followed")
    rows = CommittedRows(story.run_dir, 0)
    story.begin()
    story.log(1, 10)
    assert rows.new(track.fence("followed")) == []
    story.commit(4)
    assert [row["step"] for row in rows.new(track.fence("followed"))] == [1, 2, 3, 4]
    assert rows.new(track.fence("followed")) == []
    story.end()
    story.begin()
    story.log(5, 7)
    story.commit(6)
    found = rows.new(track.fence("followed"))
    assert [(row["step"], row["attempt"]) for row in found] == [(5, 2), (6, 2)]
    assert numbers_of(found[0]) == {"loss": 1 / 5}
    assert [row["step"] for row in CommittedRows(story.run_dir, 3).new(track.fence("followed"))] == [4, 5, 6]


async def test_the_log_of_a_foreign_command_is_handed_on_at_its_end(track: Track):
    story = Story(track, "foreign", contract=False)
    story.begin()
    story.log(1, 4)
    story.end()

    sinks = {"TensorBoard": TensorBoardFiles(story.run_dir)}
    async with Tracker(story.record, story.run_dir, sinks, ours, pytest.fail):
        pass
    assert [step for step, _ in on_tensorboard(story.run_dir)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"wandb": {}}, "tracking.wandb.project: Field required"),
        (
            {"wandb": {"project": "a", "key": "0123abcd"}},
            "write env:VARIABLE or block:NAME, never the key itself",
        ),
        ({"wandb": {"project": "a", "team": "b"}}, "tracking.wandb.team: there is no such field"),
        ({"mlflow": True}, "tracking.mlflow: there is no such field"),
    ],
)
def test_a_wrong_tracking_is_refused_in_a_sentence(wrong: Any, told: str):
    with pytest.raises(RunConfigError) as caught:
        parse_run_config({"name": "a", "command": "true", "tracking": wrong})
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_package_that_is_missing_is_named_with_its_extra_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
):
    run = parse_run_config({"name": "a", "command": "true", "tracking": BOTH})
    check_tracking(run)
    monkeypatch.setattr("tpu.runs.tracker.find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(RunConfigError, match=r"pip install 'tpu-relay\[wandb\]'"):
        check_tracking(run)
    monkeypatch.setattr("tpu.runs.tracker.find_spec", lambda name: object() if name == "wandb" else None)
    with pytest.raises(RunConfigError, match=r"pip install 'tpu-relay\[tensorboard\]'"):
        check_tracking(run)
