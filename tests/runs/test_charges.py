"""Budgets are counted from a run's history as blame has it."""

from __future__ import annotations

from typing import Any

from tpu.runs.charges import charged, newly_blamed, suspected
from tpu.runs.config import parse_run_config
from tpu.runs.event_log import RunEvent
from tpu.runs.record import RunRecord
from tpu.slices.verdict import VerdictKind


def a_record(**values: Any) -> RunRecord:
    config = parse_run_config({"name": "r", "command": ["true"], "steps": 100} | values)
    return RunRecord(config, None, {"source": "", "sha256": ""}, 0.0)


def ended(slice: str, verdict: str, reached: int | None, attempt: int | None = 1) -> RunEvent:
    detail = {
        "slice": slice,
        "verdict": verdict,
        "reached": reached,
        "attempt": attempt,
        "reason": "w0: exit code 1",
    }
    return RunEvent(0.0, "attempt-ended", detail)


LIVED_ON_A = [ended("a", "preempted", 60), ended("b", "user failure", 0, 2)]


def test_a_failure_on_a_bad_slice_is_not_charged_to_the_program() -> None:
    record = a_record(contract=True)
    assert charged(record, LIVED_ON_A) == [VerdictKind.PREEMPTED, VerdictKind.INFRASTRUCTURE]
    suspicion = suspected(record, LIVED_ON_A)
    assert suspicion is not None
    assert suspicion.proven
    assert newly_blamed(record, LIVED_ON_A) == ["b"]
    noted = RunEvent(0.0, "slice-blamed", {"slice": "b"})
    assert newly_blamed(record, [*LIVED_ON_A, noted]) == []


def test_a_command_that_says_nothing_of_its_steps_is_taken_at_its_exit_code() -> None:
    record = a_record()
    assert charged(record, LIVED_ON_A)[1] is VerdictKind.USER_FAILURE
    assert suspected(record, LIVED_ON_A) is None


def test_code_that_a_host_refused_says_nothing_of_how_far_the_program_came() -> None:
    history = [ended("a", "preempted", 60), ended("b", "user failure", None, None)]
    assert charged(a_record(contract=True), history)[1] is VerdictKind.USER_FAILURE
