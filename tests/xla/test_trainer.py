"""The XLA trainer as a process: the same bits however it is cut, on one device and on several."""

from __future__ import annotations

import pytest

from tests.xla.conftest import Maker
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
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
