"""In what state a run is, told from its fence, its controller and its history."""

from __future__ import annotations

import pytest

from tpu.checkpoint.fence import Commit, Fence
from tpu.runs.config import parse_run_config
from tpu.runs.controller import ControllerState, Owner
from tpu.runs.event_log import RunEvent
from tpu.runs.overview import REASON_LENGTH, run_state
from tpu.runs.record import RunRecord

GONE = ControllerState(Owner("flow", "elsewhere", 1, "boot/1"), 1, released=True)
RECORD = RunRecord(
    parse_run_config(
        {"name": "r", "training": {"workload": {"kind": "icl"}}, "steps": 40, "checkpoints": {"every": 20},
         "budget": {"preemption": 1}}
    ),
    None, {"source": "tree", "sha256": "ab" * 32}, 0.0,
)  # fmt: skip


def ended(verdict: str, reason: str = "why\nand more") -> RunEvent:
    return RunEvent(
        1.0, "attempt-ended", {"slice": "s", "attempt": 1, "verdict": verdict, "reason": reason, "steps": 40}
    )


def refused(reason: str) -> RunEvent:
    return RunEvent(1.0, "provision-failed", {"slice": "s", "reason": reason})


DELETED = RunEvent(2.0, "slice-deleted", {"slice": "s", "why": "why"})


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "stopped"),
        ([ended("user failure"), DELETED], "failed: user failure, why"),
        ([ended("user failure"), ended("cancelled")], "stopped"),
        ([ended("preempted")], "stopped"),
        ([ended("preempted"), ended("preempted")], "failed: preempted, why"),
        ([refused("no such zone"), DELETED], "failed: no slice: no such zone"),
        ([refused("no capacity"), ended("user failure")], "failed: user failure, why"),
        ([ended("user failure"), refused("cancelled")], "stopped"),
        ([refused("stopped by request")], "stopped"),
        (
            [ended("user failure", "x" * 500)],
            "failed: " + f"user failure, {'x' * 500}"[: REASON_LENGTH - 1] + "…",
        ),
    ],
)
def test_a_run_that_nobody_drives_has_failed_if_its_history_says_so(events, state):
    assert run_state(RECORD, Fence(), GONE, events) == state


def test_a_run_that_somebody_stopped_has_not_failed():
    assert run_state(RECORD, Fence(), GONE, [ended("user failure")], asked=True) == "stopped"


def test_a_run_whose_steps_are_all_committed_is_finished():
    whole = Fence(commits=(Commit(40, 1, "crc"),))
    assert run_state(RECORD, whole, GONE, [ended("user failure")]) == "finished"
