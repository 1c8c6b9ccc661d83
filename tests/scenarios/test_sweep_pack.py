"""Sweeps whose trials train several to a program: each a run of its own, whatever becomes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.sweep import sweep
from tests.scenarios.conftest import Lab, Pool, beside
from tests.train.test_trainer import TINY_ICL
from tpu.connection import Connection
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.ledger import make_sum
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import Search, check_sweep, parse_search
from tpu.sweeps.packing import pack_name
from tpu.sweeps.trial import Trial

STEPS, EVERY = 8_000, 1_000
RATE = "training.optimizer.learning_rate"


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_RELAY_HOME", str(tmp_path))


def base(name: str, **values: Any) -> RunConfig:
    return parse_run_config(
        {
            "name": name,
            "steps": STEPS,
            "training": TINY_ICL | {"log_every": 1000, "steps_per_call": 100},
            "checkpoints": {"every": EVERY},
            "slice": {"chips": 1, "price_an_hour": 4.0},
            "evaluate": "never",
        }
        | values
    )


def search_of(run: RunConfig, **values: Any) -> Search:
    made = parse_search({"parameters": {RATE: {"values": [1e-3, 3e-3]}}, "seeds": 2, "pack": 2} | values)
    check_sweep(run, made)
    return made


def trials(name: str) -> list[Trial]:
    return SweepBook(sweep_directory(Connection.from_environment().bucket, name)).trials()


def outcome(lab: Lab, trial: Trial) -> Any:
    return lab.digest(trial.run), lab.losses(trial.run)


@pytest.mark.slow  # four starts of JAX; tests/sweeps/test_pack_carrier.py has one, test_packing.py the decisions
async def test_packed_trials_that_are_preempted_go_on_together_with_the_bits_of_an_undisturbed_pack(
    lab: Lab, pool: Pool
):
    await pool.set(max_slices=1)
    undisturbed = base("calm")
    answer: Any = await sweep(run=undisturbed, search=search_of(undisturbed, trials=2))
    assert answer["finished"] == 2
    lab.assert_nothing_left()

    run = base("rough")
    async with beside(sweep(run=run, search=search_of(run, at_once=2))) as task:
        first = await lab.until(lambda: len(trials("rough")) == 2 and trials("rough"), "two have begun", task)
        await lab.until(lambda: all(lab.newest_step(one.run) for one in first), "both have committed", task)
        await lab.preempt(notice=False)
    assert task.result()["finished"] == 4
    assert [one.pack for one in trials("rough")] == [0, 0, 1, 1]
    for calm, rough in zip(trials("calm"), trials("rough"), strict=False):
        assert lab.verdicts(rough.run) == ["preempted", "finished"]
        assert lab.events(rough.run, "attempt-started")[1].detail["resume"] >= EVERY
        assert outcome(lab, rough) == outcome(lab, calm)
    assert [lab.verdicts(one.run) for one in trials("rough")[2:]] == [["finished"]] * 2
    for number in (0, 1):
        whole = make_sum(lab.events(pack_name("rough", number)), 0.0).dollars
        parts = [make_sum(lab.events(one.run), 0.0).dollars for one in trials("rough") if one.pack == number]
        assert sum(part or 0.0 for part in parts) == pytest.approx(whole)
    lab.assert_nothing_left()
