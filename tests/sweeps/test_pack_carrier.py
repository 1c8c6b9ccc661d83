"""The trials of a pack by one gang on an emulated chip, without Prefect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs.places import on_tensorboard
from tests.train.programs import TINY_ICL
from tpu.checkpoint import objects
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.clock import SystemClock
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.controller import this_process
from tpu.runs.crew import Crew
from tpu.runs.event_log import load_events
from tpu.runs.ledger import make_sum
from tpu.runs.opening import sharing
from tpu.runs.record import run_directory
from tpu.runtime.metrics import read_metrics
from tpu.sweeps.board import Live
from tpu.sweeps.course import Course, TrialPruned
from tpu.sweeps.metric import Metric
from tpu.sweeps.outcome import read_outcome
from tpu.sweeps.pack_carrier import PackCarrier
from tpu.sweeps.packing import pack_name
from tpu.sweeps.queue import Running
from tpu.sweeps.trial import Trial, trial_name

RATE = "training.optimizer.learning_rate"


def base(name: str, **values: Any) -> RunConfig:
    return parse_run_config(
        {
            "name": name,
            "steps": 2000,
            "training": TINY_ICL | {"log_every": 100, "steps_per_call": 50},
            "checkpoints": {"every": 500},
            "slice": {"chips": 1, "price_an_hour": 4.0},
            "evaluate": "never",
        }
        | values
    )


def trial(sweep: str, number: int, rate: float) -> Trial:
    point = {RATE: rate}
    return Trial(number, number, point, None, trial_name(sweep, point, None), pack=0)


def begin(one: Trial, report: Callable[[int, float], None] = lambda step, value: None) -> Running:
    return Running(one, Live(), Course(Metric(), report), 1)


def verdicts(run_dir: str) -> list[Any]:
    return [e.detail["verdict"] for e in load_events(run_dir) if e.kind == "attempt-ended"]


def assert_all_is_paid(connection: Connection, pack: Sequence[Trial], name: str) -> list[float]:
    """The trials' dollars, which sum to those of the pack."""
    whole = make_sum(load_events(run_directory(connection.bucket, pack_name(name, 0))), 0.0).dollars
    runs = [run_directory(connection.bucket, one.run) for one in pack]
    parts = [make_sum(load_events(run_dir), 0.0).dollars or 0.0 for run_dir in runs]
    assert sum(parts) == pytest.approx(whole)
    return parts


@pytest.fixture
async def crew(
    emulator: Emulator, program_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Crew]:
    monkeypatch.setenv("TPU_RELAY_HOME", str(tmp_path))
    connection, clock = Connection.from_environment(emulator.env), SystemClock()
    async with sharing(connection, clock, print) as shared:
        yield Crew(connection, this_process("test"), {}, shared, clock, program_folder, print)
    assert emulator.nodes() == []


async def test_trials_of_a_pack_end_one_by_one_and_pay_the_chip_together(crew: Crew):
    pack = [trial("three", number, rate) for number, rate in enumerate((1e-3, 3e-3, 1e-2))]
    batch = [begin(one) for one in pack]
    behind = batch[1] = begin(pack[1], lambda step, value: behind.course.end(TrialPruned(f"at {step}")))
    config = base("three", tracking={"tensorboard": True})
    carrier = PackCarrier(config, "loss", batch, pack, lambda: False, crew)
    ends = await asyncio.gather(*(one.carry() for one in carrier.trials), return_exceptions=True)
    assert [repr(end) for end in ends] == ["None", "TrialPruned('at 500')", "None"]
    directories = [run_directory(crew.connection.bucket, one.run) for one in pack]
    assert [verdicts(one) for one in directories] == [["finished"], ["cancelled"], ["finished"]]
    commits = [[commit.step for commit in load_fence(one).commits] for one in directories]
    assert commits == [[500, 1000, 1500, 2000], [500], [500, 1000, 1500, 2000]]
    parts = assert_all_is_paid(crew.connection, pack, "three")
    assert 0 < parts[1] < parts[0] == pytest.approx(parts[2])
    # Each is a run of its own for whoever looks at it, and the pack is none.
    for running, run_dir in zip(batch, directories, strict=True):
        logged = [(row["step"], row["loss"]) for row in read_metrics(run_dir, load_fence(run_dir))]
        assert logged[-1][0] == load_fence(run_dir).commits[-1].step
        assert list(running.live.curve.points)[: len(logged)] == logged
        assert on_tensorboard(run_dir) == [(step, pytest.approx(loss)) for step, loss in logged]
        outcome = read_outcome(run_dir, Metric(), "finished", "", crew.clock.time())
        assert outcome.curve == tuple(logged)
        assert all(use.shared_by > 1 and " chip " in use.where for use in outcome.uses)
    pack_dir = run_directory(crew.connection.bucket, pack_name("three", 0))
    assert not objects.listing(f"{pack_dir}/tensorboard")


@pytest.mark.slow  # three starts of JAX
async def test_a_preempted_pack_goes_on_in_the_same_lanes_and_has_the_bits_of_an_undisturbed_one(
    emulator: Emulator, crew: Crew
):
    found: dict[str, list[Any]] = {}
    for name, disturbed in (("calm", False), ("rough", True)):
        pack = [trial(name, number, rate) for number, rate in enumerate((1e-3, 3e-3))]
        directories = [run_directory(crew.connection.bucket, one.run) for one in pack]
        config = base(name).model_copy(update={"steps": 6000})
        carrier = PackCarrier(config, "loss", [begin(one) for one in pack], pack, lambda: False, crew)
        carrying = asyncio.gather(*(one.carry() for one in carrier.trials))
        while disturbed and not all(load_fence(run_dir).commits for run_dir in directories):
            await asyncio.sleep(0.1)
            assert not carrying.done()
        if disturbed:
            (node,) = emulator.nodes()
            await asyncio.to_thread(emulator.preempt, node["node"], notice=False)
        await carrying
        rows = [read_metrics(run_dir, load_fence(run_dir)) for run_dir in directories]
        losses = [[(row["step"], row["loss"]) for row in one] for one in rows]
        found[name] = [*map(run_digest, directories), losses]
        expected = ["preempted", "finished"] if disturbed else ["finished"]
        assert [verdicts(run_dir) for run_dir in directories] == [expected] * 2
        assert_all_is_paid(crew.connection, pack, name)
    assert found["rough"] == found["calm"]
