"""The XLA trainer as a process: the same bits however it is cut, on one device and on several."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.xla.conftest import TINY_ICL, Maker
from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at, run_digest
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.restore import read_commit
from tpu.runtime.metrics import read_events, read_metrics
from tpu.runtime.segment import EXIT_NOTICED


def losses(run):
    return [(row["step"], row["loss"]) for row in read_metrics(run.run_dir, load_fence(run.run_dir))]


@pytest.mark.parametrize("devices", [1, 2])
def test_two_processes_and_a_resumed_one_have_the_same_bits(by_hand: Maker, devices: int):
    whole = by_hand(f"whole-{devices}", devices=devices)
    assert whole.start().exit_codes() == [0], whole.started[-1].output()
    bits = run_digest(whole.run_dir, 30, prefix="")
    assert [step for step, _ in losses(whole)] == [5, 10, 15, 20, 25, 30]

    cut = by_hand(f"cut-{devices}", devices=devices)
    first = cut.start()
    first.wait_for(lambda event: event["event"] == "commit" and event["step"] == 10)
    first.kill()
    second = cut.start()
    second.wait_for(lambda event: event["event"] == "step")
    second.notice()
    assert second.exit_codes() in ([EXIT_NOTICED], [0])
    if load_fence(cut.run_dir).newest().step < 30:
        assert cut.start().exit_codes() == [0], cut.started[-1].output()
    assert run_digest(cut.run_dir, 30, prefix="") == bits
    assert losses(cut) == losses(whole)

    graphs = [event for _, event in read_events(whole.run_dir) if event["event"] == "graphs"]
    assert graphs
    assert graphs[-1]["recompiled"] == 0
    assert graphs[-1]["fallbacks"] == {}


def test_the_number_of_devices_and_sharding_change_rounding_and_nothing_else(by_hand: Maker):
    """The batches are the same: losses agree but for the order of sums."""
    runs = {
        "one": by_hand("one", last_step=10, stops=[10]),
        "four": by_hand("four", last_step=10, stops=[10], devices=4),
        "sharded": by_hand(
            "sharded", last_step=10, stops=[10], devices=4, config=TINY_ICL | {"shard_parameters": True}
        ),
    }
    shapes = {}
    for name, run in runs.items():
        assert run.start().exit_codes() == [0], run.started[-1].output()
        assert f"{run.devices} devices in 1 processes" in run.started[-1].output()
        restored = read_commit(run.run_dir, commit_at(load_fence(run.run_dir).commits, 10, run.run_dir))
        shapes[name] = {n: array.shape for n, array in restored.arrays.items()}
    assert shapes["one"] == shapes["four"] == shapes["sharded"]
    expected = [loss for _, loss in losses(runs["one"])]
    for name in ("four", "sharded"):
        np.testing.assert_allclose([loss for _, loss in losses(runs[name])], expected, rtol=1e-5)


def test_the_next_steps_are_traced_on_request(by_hand: Maker):
    run = by_hand("traced", last_step=4000, stops=[4000])
    attempt = run.start()
    attempt.wait_for(lambda event: event["event"] == "step")
    (attempt.folders[0] / "profile.json").write_text(json.dumps({"steps": 10}))
    assert attempt.exit_codes(180) == [0], attempt.output()
    traces = [url for url in files.names(f"{run.run_dir}/profiles/1") if url.endswith(".xplane.pb")]
    assert len(traces) == 1
    assert "/host-0/" in traces[0]


def test_several_hosts_are_refused_on_the_cpu_with_the_way_on(by_hand: Maker):
    run = by_hand("two-hosts", processes=2)
    assert run.start().exit_codes() == [1, 1]
    assert "no way between processes" in run.started[-1].output()
    assert "v4-8" in run.started[-1].output()
