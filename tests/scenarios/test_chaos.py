"""The chaos benchmark in short form: a few of its histories, each of which must hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployments.bench.chaos.histories import left_in_all, open_stage, play_all, summary
from deployments.bench.chaos.plan import make_history
from tpu.emulator.emulator import Emulator

# Among them: preemptions, killed flows, hosts and programs, API errors; one that cannot end well.
SEEDS = (6, 79)


def test_histories_of_trouble_end_with_the_right_bits_or_an_honest_verdict(
    emulator: Emulator, prefect_environment: dict[str, str], tmp_path: Path
):
    faults = {fault for seed in SEEDS for fault in make_history(seed).faults}
    assert {"preempt", "kill-flow", "kill-host", "api-error"} <= faults
    assert any(make_history(seed).doom for seed in SEEDS)
    with open_stage(emulator, os.environ | prefect_environment, tmp_path) as stage:
        figures = summary(play_all(stage, SEEDS, len(SEEDS), print), left_in_all(emulator))
    assert figures["failures"] == []
    assert (figures["ratio"], figures["leaks"]) == (1.0, 0)


def test_a_history_that_cannot_be_played_does_not_hold(
    tmp_path: Path, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployments.bench.chaos.histories.play", lambda *_: 1 / 0)
    with open_stage(emulator, dict(os.environ), tmp_path) as stage:
        figures = summary(play_all(stage, [1], 1, print), [])
    assert (figures["ratio"], figures["histories"]) == (0.0, 1)
    assert "ZeroDivisionError" in figures["failures"][0]["why"][0]
