"""The trainer through the segment contract: the same bits, however its attempts end."""

from __future__ import annotations

import json
import os

import pytest

from tests.train.attempts import ByHand
from tests.train.programs import TINY_ICL
from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.runtime.metrics import read_metrics
from tpu.train import evaluate
from tpu.train.text import text_sha256


@pytest.fixture
def by_hand(bucket, tmp_path):
    """Makes runs; their processes are gone after the test."""
    runs = []

    def make(name, config, last_step, stops, **options):
        runs.append(
            ByHand(
                os.environ["STORAGE_EMULATOR_HOST"],
                name,
                tmp_path / name,
                config,
                last_step,
                stops,
                **options,
            )
        )
        return runs[-1]

    yield make
    for run in runs:
        for attempt in run.started:
            attempt.kill()


CALLS_OF_50 = TINY_ICL | {"log_every": 100, "steps_per_call": 50}


def outcome(run):
    """Parameters' hash and all logged numbers."""
    metrics = read_metrics(run.run_dir, load_fence(run.run_dir))
    return run_digest(run.run_dir, run.last_step), [
        {name: value for name, value in record.items() if name not in ("t", "attempt")} for record in metrics
    ]


@pytest.mark.slow  # scenarios/test_same_bits_jax.py holds it through the whole flow
def test_the_same_bits_through_a_notice_a_kill_and_other_segments(by_hand):
    steps = 6000
    straight = by_hand("straight", CALLS_OF_50, steps, [steps])
    assert straight.start().exit_codes(180) == [0], straight.started[0].output()

    broken = by_hand("broken", CALLS_OF_50, steps, [377, 1000, 1500, 5000, steps])
    noticed = broken.start()
    noticed.wait_for(lambda e: e["event"] == "step" and e["step"] >= 300)
    noticed.notice()
    assert noticed.exit_codes() == [75], noticed.output()
    killed = broken.start()
    (killed.folders[0] / "profile.json").write_text('{"steps": 1}')
    killed.wait_for(lambda e: e["event"] == "step" and e["step"] >= 2000)
    killed.kill()
    last = broken.start()
    assert last.exit_codes(180) == [0], last.output()

    restored = [e for a in broken.started for e in a.events() if e["event"] == "restored"]
    assert restored[0]["step"] == 0
    assert restored[1]["step"] >= 300
    assert restored[1]["step"] <= restored[2]["step"] < steps
    assert outcome(broken) == outcome(straight)

    traced = files.names(f"{broken.run_dir}/profiles/2/{restored[1]['step']}/host-0")
    assert any(name.endswith("perfetto_trace.json.gz") for name in traced)
    assert any(name.endswith(".xplane.pb") for name in traced)


@pytest.mark.slow
def test_two_processes_stop_at_one_step_and_go_on_to_the_same_bits(by_hand, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{n} plus {n} is {n + n}. " for n in range(2000)))
    model = {"layers": 1, "width": 8, "heads": 2}
    config = {
        "workload": {"kind": "bytelm", "text": [str(text)], "context": 8, "batch": 8, "model": model},
        "data_sha256": text_sha256([str(text)]),
        "steps_per_call": 5, "log_every": 5,
    }  # fmt: skip
    steps = 200
    straight = by_hand("pair-straight", config, steps, [steps], processes=2, devices=2)
    assert straight.start().exit_codes(180) == [0, 0], straight.started[0].output()

    broken = by_hand("pair-broken", config, steps, [10, 153, steps], processes=2, devices=2)
    noticed = broken.start()
    noticed.wait_for(lambda e: e["event"] == "step")
    noticed.processes[1].terminate()  # one host hears of it first, or alone
    assert noticed.exit_codes() == [75, 75], noticed.output()
    assert [e["step"] for e in noticed.events(0) if e["event"] == "notice"] == [
        e["step"] for e in noticed.events(1) if e["event"] == "notice"
    ]
    last = broken.start()
    assert last.exit_codes(180) == [0, 0], last.output()
    assert outcome(broken) == outcome(straight)

    assert "Gloo" not in last.output()

    # Each process of the last attempt found what it had compiled: a fresh host compiles nothing.
    entries = [
        len(list(home.glob(".relay/compile-cache/*/complete/*")))
        for home in sorted(broken.folder.glob("home-*"))
    ]
    assert entries == [2, 2]


@pytest.mark.slow
def test_two_processes_that_share_parameters_save_and_restore_them(by_hand):
    run = by_hand("pair-sharded", TINY_ICL | {"shard_parameters": True}, 5, [5], processes=2, devices=2)
    assert run.start().exit_codes() == [0, 0], run.started[0].output()
    run.last_step = 10
    longer = run.start()
    assert longer.exit_codes() == [0, 0], longer.output()
    assert [e["step"] for e in longer.events() if e["event"] in ("restored", "done")] == [5, 10]


def test_changed_text_stops_the_trainer_with_a_sentence(by_hand, tmp_path):
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 50)
    config = {
        "workload": {"kind": "bytelm", "text": [str(text)], "context": 8, "batch": 8},
        "data_sha256": text_sha256([str(text)]),
    }
    text.write_text("to be or not to bee" * 50)
    attempt = by_hand("changed", config, 10, [10]).start()
    assert attempt.exit_codes() == [1]
    assert "has changed: this run started on sha256" in attempt.output()


def test_a_checkpoint_is_evaluated_from_the_bucket(by_hand, capsys, tmp_path):
    run = by_hand("evaluated", CALLS_OF_50, 5, [5])
    assert run.start().exit_codes() == [0]
    record = {"config": {"name": "evaluated", "training": CALLS_OF_50}, "data_sha256": None}
    files.write(f"{run.run_dir}/run.json", json.dumps(record).encode())
    evaluate.main([run.run_dir, "5", "--out", str(tmp_path / "out.json")])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert found["step"] == 5
    assert found["parameters_sha256"] == run_digest(run.run_dir, 5)
    assert {"delta_dmmse", "delta_ridge", "zero_error"} <= found["new"].keys()
