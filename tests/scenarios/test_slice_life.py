"""Slices that come back by themselves, that end at a known time, that are bad, or that somebody deletes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import STAYS, Lab
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.gang import follow_gang
from tpu.runs import slice_holder, trouble, watch
from tpu.slices import life_limit

# No failure of the machine may be charged to the program.
STRICT = {"user_failure": 0}


async def test_P10_a_node_under_repair_is_waited_for_and_taken_up_again(lab: Lab):
    run = lab.numpy_run(
        "repaired", steps=40, slice={"provisioning": "on-demand"}, budget=STRICT | {"infrastructure": 1},
        variables=STAYS,
    )  # fmt: skip
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        await asyncio.to_thread(lab.emulator.repair, node, 5.0)  # its hosts come back with empty disks
    assert lab.verdicts(run.name) == ["infrastructure", "finished"]
    ended, finished = lab.events(run.name, "attempt-ended")
    assert "REPAIRING" in ended.detail["reason"]
    assert finished.detail["slice"] == node
    assert len(lab.events(run.name, "slice-intended")) == 1
    assert [e.detail["ready"] for e in lab.events(run.name, "repair-wait-done")] == [True]
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_P10_a_repair_that_lasts_longer_than_its_deadline_is_given_up(lab: Lab):
    run = lab.numpy_run(
        "unrepaired", steps=40, slice={"provisioning": "on-demand", "repair_minutes": 0.03}, budget=STRICT,
        variables=STAYS,
    )  # fmt: skip
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        await asyncio.to_thread(lab.emulator.repair, node, 600.0)
    assert lab.verdicts(run.name) == ["infrastructure", "finished"]
    assert lab.events(run.name, "attempt-ended")[1].detail["slice"] != node
    assert "repair" in lab.events(run.name, "slice-deleted")[0].detail["why"]
    lab.assert_as_undisturbed(run)


async def test_P11_the_end_of_a_preemptible_nodes_day_costs_no_step(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(life_limit, "PREEMPTIBLE_LIFE_S", 14.0)  # it is told to save after half of it
    lab.emulator.set_life(14.0)
    run = lab.numpy_run(
        "one-day", steps=120, step_s=0.1, slice={"provisioning": "preemptible"}, budget=STRICT | {"infrastructure": 0}
    )  # fmt: skip
    async with lab.training(run):
        pass
    ends = lab.events(run.name, "attempt-ended")
    *before, last = (end.detail["verdict"] for end in ends)
    assert before == ["preempted"] * (len(ends) - 1) != []
    assert last in ("finished", "preempted")  # its time may be over while its last process leaves
    for end, following in itertools.pairwise(ends):
        assert "lives for" in end.detail["reason"]
        # The step at which it was told to save is the one from which the next attempt goes on.
        assert following.detail["resume"] == end.detail["last_commit"] >= end.detail["reached"]
    assert lab.emulator.preempted() == []  # each was deleted ahead of its end
    lab.assert_as_undisturbed(run)


async def test_V9_hosts_that_never_answer_cost_a_slice_and_nothing_else(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slice_holder, "CONNECT_S", 3.0)
    monkeypatch.setattr(trouble, "SLICE_LAG_S", 1.0)
    run = lab.numpy_run("no-ssh", steps=20, budget=STRICT)
    async with lab.training(run) as task:
        await lab.until(lambda: lab.events(run.name, "sync-started"), "its code was on the way", task)
        await asyncio.to_thread(lab.emulator.kill_host, lab.ready_nodes()[0], 0)
    assert lab.verdicts(run.name) == ["infrastructure", "finished"]
    assert len(lab.events(run.name, "slice-intended")) == 2
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_V12_a_slice_that_somebody_deletes_is_a_loss_and_no_loop(lab: Lab):
    run = lab.numpy_run("deleted", steps=40, variables=STAYS, budget=STRICT | {"infrastructure": 1})
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        async with open_cloud(Connection.from_environment()) as cloud:
            await cloud.delete_queued_resource(run.slice.zone, node)
    first, last = lab.verdicts(run.name)
    assert first in ("preempted", "infrastructure")
    assert last == "finished"
    assert len(lab.events(run.name, "slice-intended")) == 2
    lab.assert_as_undisturbed(run)


# The n-th slice on which it runs is bad: the program dies there at once, and nowhere else.
BAD = (
    'grep -qxF "$HOME" "$SEEN" || echo "$HOME" >> "$SEEN"; '
    'n=$(grep -nxF "$HOME" "$SEEN" | cut -d: -f1); '
    '[ "$n" != "$BAD" ] || { echo "RuntimeError: bad machine"; exit 1; }; exec "$@"'
)


@pytest.mark.slow
async def test_a_slice_on_which_a_run_dies_that_lived_elsewhere_is_replaced_and_nobody_charged(
    lab: Lab, tmp_path: Path
):
    run = lab.numpy_run(
        "bad-machine", steps=40, budget=STRICT,
        command=["/bin/bash", "-c", BAD, "sh", sys.executable, "-m", "tests.trainers.numpy_trainer"],
        variables=STAYS | {"SEEN": str(tmp_path / "seen"), "BAD": "2"},
    )  # fmt: skip
    (tmp_path / "seen").touch()
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        await lab.preempt(run)
    assert lab.verdicts(run.name) == ["preempted", "user failure", "finished"]
    slices = [event.detail["slice"] for event in lab.events(run.name, "attempt-ended")]
    (blamed,) = lab.events(run.name, "slice-blamed")
    assert blamed.detail["slice"] == slices[1]
    assert len(set(slices)) == 3
    lab.assert_as_undisturbed(run)


async def test_the_last_try_is_made_on_another_machine_and_tells_whose_fault_it_was(lab: Lab, tmp_path: Path):
    run = lab.numpy_run(
        "last-try", steps=20,
        command=["/bin/bash", "-c", BAD, "sh", sys.executable, "-m", "tests.trainers.numpy_trainer"],
        variables={"SEEN": str(tmp_path / "seen"), "BAD": "1"},
    )  # fmt: skip
    (tmp_path / "seen").touch()
    async with lab.training(run):
        pass
    assert lab.verdicts(run.name) == ["user failure", "user failure", "finished"]
    first, second, third = (event.detail["slice"] for event in lab.events(run.name, "attempt-ended"))
    assert first == second != third
    assert [event.detail["slice"] for event in lab.events(run.name, "slice-avoided")] == [first]
    assert [event.detail["slice"] for event in lab.events(run.name, "slice-blamed")] == [first]
    lab.assert_as_undisturbed(run)


@pytest.mark.slow
async def test_P10_a_flow_that_dies_while_it_waits_for_a_repair_is_followed_by_one_that_waits(
    lab: Lab, tmp_path: Path
):
    run = lab.numpy_run(
        "repaired-alone", steps=40, slice={"provisioning": "on-demand"}, variables=STAYS,
        budget=STRICT | {"infrastructure": 1},
    )  # fmt: skip
    async with lab.flow_process(run, tmp_path) as flow:
        await lab.until_step(run.name, 20)
        (node,) = lab.ready_nodes()
        await asyncio.to_thread(lab.emulator.repair, node, 12.0)
        await lab.until(lambda: lab.events(run.name, "repair-wait-started"), "the wait for its repair")
        flow.kill()
        await flow.wait()
    await lab.train(run)
    assert lab.verdicts(run.name) == ["infrastructure", "finished"]
    assert {event.detail["slice"] for event in lab.events(run.name, "attempt-ended")} == {node}
    assert len(lab.events(run.name, "slice-intended")) == 1
    lab.assert_as_undisturbed(run)


@pytest.mark.slow  # the two other tests of P10 are shorter
async def test_P10_what_goes_on_after_maintenance_is_ended_before_the_next_gang_starts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch, "follow_gang", functools.partial(follow_gang, silence_s=3.0))
    run = lab.numpy_run(
        "frozen", steps=40, slice={"provisioning": "on-demand"}, variables=STAYS,
        budget=STRICT | {"infrastructure": 1},
    )  # fmt: skip
    async with lab.training(run) as task:
        await lab.until_step(run.name, 20, task)
        (node,) = lab.ready_nodes()
        before = set(lab.pids("numpy_trainer"))
        await asyncio.to_thread(lab.emulator.repair, node, 12.0, maintenance=True, reboot=False)
        await lab.until(lambda: len(lab.events(run.name, "attempt-started")) == 2, "another attempt", task)
        assert before
        assert not before & set(lab.pids("numpy_trainer"))
    assert {event.detail["slice"] for event in lab.events(run.name, "attempt-ended")} == {node}
    assert "UNHEALTHY_MAINTENANCE" in lab.events(run.name, "attempt-ended")[0].detail["reason"]
    lab.assert_as_undisturbed(run)


async def test_G8_a_gang_without_progress_is_ended_and_goes_on_elsewhere(lab: Lab):
    run = lab.numpy_run(
        "no-progress", steps=40, progress_minutes=0.2, budget=STRICT, variables=STAYS
    )  # fmt: skip
    async with lab.training(run):
        pass
    hung, finished = lab.events(run.name, "attempt-ended")
    assert (hung.detail["verdict"], finished.detail["verdict"]) == ("infrastructure", "finished")
    assert "no progress: no step for" in hung.detail["reason"]
    assert hung.detail["slice"] != finished.detail["slice"]
    assert finished.detail["resume"] == 20
    lab.assert_as_undisturbed(run)
