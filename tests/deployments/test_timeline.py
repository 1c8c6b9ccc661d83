"""What the benchmarks make of events."""

from __future__ import annotations

import pytest

from deployments.bench.timeline import border_seconds, phase_seconds, recovery_parts, start_parts
from tpu.runs.event_log import RunEvent


def phase(t: float, name: str) -> dict:
    return {"t": t, "event": "phase", "phase": name}


TRAINER = [
    {"t": 20.0, "event": "start"},
    phase(20.0, "start"),
    phase(21.0, "compile"),
    phase(21.5, "start"),
    phase(21.75, "restore"),
    phase(22.0, "start"),
    phase(22.125, "step"),
    {"t": 23.0, "event": "step", "step": 20},
    phase(24.0, "save"),
    phase(24.25, "step"),
    phase(26.0, "save"),
    phase(27.0, "other"),
]


def test_each_phase_lasts_until_the_next():
    assert phase_seconds(TRAINER, 28.0) == pytest.approx(
        {"start": 1.375, "compile": 0.5, "restore": 0.25, "step": 3.625, "save": 1.25, "other": 1.0}
    )


def test_the_last_border_waits_for_its_commit_and_is_no_border():
    assert border_seconds(TRAINER) == [0.25]


def test_a_start_ends_at_its_first_step():
    parts = start_parts(19.0, TRAINER)
    assert parts == pytest.approx(
        {"launch": 1.0, "start": 1.375, "restore": 0.25, "compile": 0.5, "first step": 0.875}
    )
    assert sum(parts.values()) == pytest.approx(23.0 - 19.0)


def test_the_parts_of_a_recovery_sum_to_it():
    run = [
        RunEvent(1.0, "sync-done", {}),  # of the first attempt: before the death
        RunEvent(12.0, "attempt-ended", {"ended": 11.5}),
        RunEvent(13.0, "slice-deleted", {}),
        RunEvent(15.0, "sync-started", {}),
        RunEvent(16.0, "sync-done", {}),
        RunEvent(40.0, "attempt-ended", {"ended": 39.0}),
    ]
    parts = recovery_parts(10.0, run, TRAINER)
    assert parts["detect"] == 1.5
    assert parts["delete"] == 1.5
    assert parts["provision"] == 2.0
    assert parts["sync"] == 1.0
    assert parts["launch"] == 4.0
    assert sum(parts.values()) == pytest.approx(23.0 - 10.0)
