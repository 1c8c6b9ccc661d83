"""The same bits whatever the number of slices, and whoever dies, hangs, comes and goes in whatever phase of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.elastic.conftest import CoordinatorThread, Lab, Members

UNITS, STEPS = 8, 20
OPTIONS: dict[str, Any] = {
    "units": UNITS, "last_step": STEPS, "reconnect_s": 0.5, "silent_s": 20.0, "stuck_s": 20.0, "ahead_s": 0.1
}  # fmt: skip
TOLD: dict[str, Any] = {"units": UNITS, "steps": STEPS}
# Slow enough for a test to do something in the midst of the steps.
PACED = {**TOLD, "unit_s": 0.01}


def fixed(lab: Lab, slices: int, **told: Any) -> tuple[dict[int, str], str]:
    """What comes out when nothing happens to anybody."""
    told = {**TOLD, **told}
    members, _ = begin(lab, slices, told, last_step=told["steps"])
    members.wait()
    return members.result()


def begin(lab: Lab, slices: int, told: dict[str, Any], **options: Any) -> tuple[Members, CoordinatorThread]:
    members, coordinator = lab.open(**{**OPTIONS, "expect": slices, **options})
    for number in range(slices):
        members.start(f"s{number}", **told)
    return members, coordinator


def out(coordinator: CoordinatorThread) -> list[tuple[str, str]]:
    """Who was given up before it had finished, and why."""
    gone = [event for event in coordinator.events if event["kind"] == "is out"]
    return [(event["slice"], event["reason"]) for event in gone if event["reason"] != "it has finished"]


def test_one_to_four_members_come_to_the_same_bits(lab: Lab) -> None:
    alone = fixed(lab, 1)
    assert len(alone[0]) == STEPS
    for slices in (2, 3, 4):
        assert fixed(lab, slices) == alone


@pytest.mark.parametrize(
    "phase",
    [
        "sending",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("waiting", "computing", "receiving", "applying")
        ),
    ],
)
def test_a_member_killed_in_any_phase_changes_no_bit(lab: Lab, phase: str) -> None:
    members, coordinator = begin(
        lab, 3, {**TOLD, "fault": {"slice": "s1", "phase": phase, "step": 9, "after": 1}}
    )
    members.wait()
    assert [name for name, _ in out(coordinator)] == ["s1"]
    assert members.result() == fixed(lab, 1)


@pytest.mark.parametrize("phase", ["committing", pytest.param("saving", marks=pytest.mark.slow)])
def test_when_the_member_that_saves_is_killed_another_one_saves(lab: Lab, phase: str) -> None:
    told = {**TOLD, "stop_steps": [10, STEPS]}
    members, coordinator = lab.open(**OPTIONS, expect=3)
    fault = {"phase": phase, "step": 10}
    members.start("s0", **told, fault=fault)
    members.until(lambda: coordinator.coordinator.state.members, "s0 joins")  # so that it is the first member
    members.start("s1", **told)
    members.start("s2", **told)
    members.wait()
    assert [name for name, _ in out(coordinator)] == ["s0"]
    assert members.result() == fixed(lab, 1)
    saved = {record["saved"]: record["slice"] for record in members.records() if "saved" in record}
    assert saved.keys() == {10, STEPS}
    assert "s0" not in saved.values()


def test_two_members_killed_at_once(lab: Lab) -> None:
    members, coordinator = begin(lab, 4, PACED)
    members.until(lambda: members.reached(5), "step 5")
    for name, process in members.processes:
        if name in ("s0", "s2"):
            process.kill()
    members.wait()
    assert sorted(name for name, _ in out(coordinator)) == ["s0", "s2"]
    assert members.result() == fixed(lab, 1)


def test_a_member_that_comes_back_gets_the_state_from_a_peer_and_takes_units(lab: Lab) -> None:
    told = {**PACED, "steps": 60}
    members, coordinator = begin(lab, 2, told, last_step=60)
    members.until(lambda: members.reached(5), "step 5")
    members.processes[1][1].kill()
    members.until(lambda: out(coordinator), "the loss is seen")
    back = members.start("s1", **told)
    members.wait()
    assert members.result() == fixed(lab, 1, steps=60)
    entered = [e for e in coordinator.events if e["kind"] == "takes part" and e["slice"] == "s1"][-1]
    assert entered["step"] > 5
    own = [r["step"] for r in members.records("s1") if "step" in r and str(back.pid) in r["file"]]
    assert own[0] == entered["step"]
    assert own == list(range(entered["step"], 60))


def test_a_slow_member_gets_fewer_units(lab: Lab) -> None:
    told = {**TOLD, "steps": 40}
    members, coordinator = lab.open(**{**OPTIONS, "last_step": 40}, expect=2)
    members.start("slow", **told, unit_s=0.03)
    members.start("fast", **told, unit_s=0.01)
    members.until(lambda: members.reached(30), "step 30")
    table = coordinator.coordinator.state.tables[-1]
    names = {i: member.slice for i, member in coordinator.coordinator.state.members.items()}
    shares = {names[i]: len(table.units_of(i)) for i in table.members}
    assert shares == {"slow": 2, "fast": 6}
    members.wait()
    assert out(coordinator) == []
    assert members.result() == fixed(lab, 1, steps=40)


def test_a_member_that_is_stopped_is_given_up_and_comes_back_as_a_new_one(lab: Lab) -> None:
    told = {**PACED, "steps": 150}
    members, coordinator = begin(lab, 3, told, last_step=150, silent_s=1.0)
    members.until(lambda: members.reached(5), "step 5")
    stopped = members.processes[1][1]
    os.kill(stopped.pid or 0, signal.SIGSTOP)
    members.until(lambda: out(coordinator), "it is given up")
    os.kill(stopped.pid or 0, signal.SIGCONT)
    members.wait()
    assert out(coordinator) == [("s1", "no word from it for 1 s")]
    assert members.result() == fixed(lab, 1, steps=150)
    assert sum("done" in record for record in members.records()) == 3
    assert [e["slice"] for e in coordinator.events if e["kind"] == "joins"].count("s1") == 2


def test_a_member_that_hangs_in_a_unit_while_it_still_reports_is_given_up(lab: Lab) -> None:
    members, coordinator = begin(
        lab, 3, {**TOLD, "hang": {"slice": "s2", "step": 7}}, stuck_s=4.0
    )  # longer than a busy machine lets a member wait
    members.until(lambda: sum("done" in record for record in members.records()) == 2, "the others end")
    [(name, why)] = out(coordinator)
    assert name == "s2"
    assert "it waits for nobody" in why
    assert members.result() == fixed(lab, 1)


def test_a_member_with_another_state_is_named_and_kept_out(lab: Lab) -> None:
    members, coordinator = lab.open(**OPTIONS, expect=3)
    for number in range(3):
        members.start(f"s{number}", **PACED, flip=8 if number == 2 else None)
    members.wait()
    [(name, why)] = out(coordinator)
    assert (name, why) == ("s2", "its state after step 10 differs from that of 2 of 3 members")
    right = [record["done"] for record in members.records() if "done" in record]
    assert right == [fixed(lab, 1)[1]] * 2
    [told] = [record for record in members.records("s2") if "out" in record]
    assert told["final"]


def test_another_coordinator_takes_over_where_the_first_one_died(lab: Lab) -> None:
    told = {**PACED, "steps": 100}
    members, first = begin(lab, 3, told, last_step=100)
    members.until(lambda: members.reached(5), "step 5")
    first.end()
    members.processes[0][1].kill()  # nobody is there to see it
    second = lab.coordinate(members.folder, **{**OPTIONS, "last_step": 100, "expect": 3})
    members.wait()
    assert [event["kind"] for event in second.events if event["kind"] == "joins"] == []
    assert len(out(second)) == 1
    assert members.result() == fixed(lab, 1, steps=100)


def test_when_all_are_gone_the_run_goes_on_from_the_last_commit(lab: Lab) -> None:
    told = {**PACED, "stop_steps": [8, STEPS]}
    members, coordinator = begin(lab, 2, told)
    members.until(lambda: any("saved" in record for record in members.records()), "step 8 is saved")
    for _, process in members.processes:
        process.kill()
    members.until(lambda: len(out(coordinator)) == 2, "the losses are seen")
    again = [members.start(f"t{number}", **told) for number in range(2)]
    members.wait()
    assert [process.exitcode for process in again] == [0, 0]
    assert members.result() == fixed(lab, 1)
