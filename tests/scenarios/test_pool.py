"""Slices that outlive runs, are shared by chips, and change hands: with real flows, hosts and processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from itertools import pairwise
from pathlib import Path

import pytest

from tests.scenarios.conftest import SLOW_AT_FIRST, STAYS, Lab, Pool, beside
from tests.trainers.gate import Gate
from tpu.runs import membership
from tpu.runs.config import RunConfig
from tpu.slices.lease import Lease, LeaseObserver, LeaseState


def overlaps(lease: Lease) -> bool:
    """Whether two ever had the same chip at the same time."""
    for chip in range(lease.chips):
        times = sorted((s.start, s.end) for s in lease.spans if s.run is not None and chip in s.chips)
        if any(end > start for (_, end), (start, _) in pairwise(times)):
            return True
    return False


def kinds(lab: Lab, run: RunConfig, *wanted: str) -> list[str]:
    return [event.kind for event in lab.events(run.name) if event.kind in wanted]


GOT = ("slice-intended", "slice-leased", "slice-released", "slice-deleted")


async def test_G5_two_flows_want_the_only_slice_at_once_and_have_it_one_after_the_other(
    lab: Lab, pool: Pool, tmp_path: Path
):
    await pool.set(max_slices=1, idle_minutes=5)
    runs = [lab.numpy_run(f"both-{n}", steps=20, every=20) for n in range(2)]
    async with lab.flow_process(runs[0], tmp_path) as first, lab.flow_process(runs[1], tmp_path) as second:
        assert await asyncio.gather(first.wait(), second.wait()) == [0, 0]
    living = [lease for lease in await pool.leases() if lease.ready is not None]
    (lease,) = living
    assert {span.run for span in lease.spans} >= {"both-0", "both-1"}
    assert not overlaps(lease)
    for run in runs:
        lab.assert_as_undisturbed(run)
        assert lab.verdicts(run.name) == ["finished"]
    assert lab.ready_nodes() == [lease.slice]
    assert (lease.state, lease.holders) == (LeaseState.READY, ())


async def test_V12_the_next_run_takes_a_finished_runs_slice_and_one_that_a_person_deleted_is_noticed_once(
    lab: Lab, pool: Pool
):
    await pool.set(idle_minutes=5)
    first, second, third = runs = [
        lab.numpy_run(name, steps=10, every=10) for name in ("one", "two", "three")
    ]
    for run in runs[:2]:
        await lab.train(run)
    assert kinds(lab, first, *GOT) == ["slice-intended", "slice-released"]
    assert kinds(lab, second, *GOT) == ["slice-leased", "slice-released"]
    (lease,) = await pool.leases()
    assert lab.ready_nodes() == [lease.slice]
    assert [span.run for span in lease.spans] == ["one", None, "two"]

    await pool.delete_by_hand(lease)
    await lab.train(third)
    assert kinds(lab, third, *GOT) == ["slice-leased", "slice-deleted", "slice-intended", "slice-released"]
    states = [one.state for one in sorted(await pool.leases(), key=lambda lease: lease.created)]
    assert states == [LeaseState.GONE, LeaseState.READY]
    for run in runs:
        lab.assert_as_undisturbed(run)
        assert lab.verdicts(run.name) == ["finished"]


async def test_G6_of_three_runs_on_the_chips_of_one_slice_one_is_killed_and_the_others_go_on(
    lab: Lab, pool: Pool, tmp_path: Path
):
    gate = Gate(tmp_path / "gate", before=15)
    runs = [
        lab.numpy_run(f"chip-{n}", steps=30, every=10, slice={"chips": 1}, variables=gate.variables)
        for n in range(3)
    ]
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(lab.flow_process(runs[0], tmp_path))
        await lab.until(lambda: gang_pids(lab, runs[0]), "the other process trains")
        for run in runs[1:]:
            await stack.enter_async_context(lab.training(run))
        await lab.until(lambda: all(lab.newest_step(run.name) == 10 for run in runs), "all have committed")
        (lease,) = [lease for lease in await pool.leases() if lease.state is LeaseState.READY]
        assert sorted(chip for holder in lease.holders for chip in holder.chips) == [0, 1, 2]
        lab.kill(gang_pids(lab, runs[1]))
        await lab.until(lambda: lab.verdicts(runs[1].name), "the verdict")
        gate.open()
        assert await other.wait() == 0
    for run in runs:
        lab.assert_as_undisturbed(run)
    assert lab.verdicts(runs[1].name) == ["infrastructure", "finished"]
    assert lab.verdicts(runs[0].name) == lab.verdicts(runs[2].name) == ["finished"]
    (lease,) = [lease for lease in await pool.leases() if lease.ready is not None]
    assert not overlaps(lease)
    assert lease.state is LeaseState.GONE
    lab.assert_nothing_left()


def gang_pids(lab: Lab, run: RunConfig) -> list[int]:
    """Processes of a run's program, wherever it runs."""
    marker = f"RELAY_RUN={run.name}".encode()
    found = []
    for pid in lab.pids("numpy_trainer"):
        with contextlib.suppress(OSError):
            found += [pid] if marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") else []
    return found


async def test_a_run_of_higher_priority_evicts_at_the_next_commit_and_the_evicted_one_comes_back(
    lab: Lab, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(membership, "LEASE_BEAT_S", 1.0)
    await pool.set(max_slices=1)
    gate = Gate(tmp_path / "gate", before=25)
    low = lab.numpy_run("low", steps=120, every=20, step_s=0.1, variables=SLOW_AT_FIRST | gate.variables,
                        budget={"preemption": 0})  # fmt: skip
    high = lab.numpy_run("high", steps=20, every=20, priority=5)
    async with lab.training(low) as task:
        await lab.until_step(low.name, 20, task)
        async with beside(lab.train(high)):
            await lab.until(lambda: any(lease.claim for lease in asyncio.run(pool.leases())), "its claim")
            gate.open()
    for run in (low, high):
        lab.assert_as_undisturbed(run)
    assert lab.verdicts(high.name) == ["finished"]
    evicted, finished = (event.detail for event in lab.events(low.name, "attempt-ended"))
    assert (evicted["verdict"], evicted["reason"]) == ("preempted", "evicted by run high (priority 5)")
    assert finished["verdict"] == "finished"
    assert evicted["last_commit"] >= evicted["reached"] - 1
    # The slice changed hands: none was deleted and made again.
    assert kinds(lab, high, *GOT)[0] == "slice-leased"
    assert kinds(lab, low, *GOT)[:3] == ["slice-intended", "slice-released", "slice-leased"]
    assert len([lease for lease in await pool.leases() if lease.ready is not None]) == 1
    lab.assert_nothing_left()


async def test_O1_a_killed_flows_lease_expires_and_who_takes_it_ends_its_gang_first(
    lab: Lab, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(membership, "LeaseObserver", functools.partial(LeaseObserver, ttl_s=4.0))
    await pool.set(max_slices=1, idle_minutes=5)
    dead = lab.numpy_run("dead", steps=40, every=20, variables=STAYS)
    heir = lab.numpy_run("heir", steps=20, every=20)
    async with lab.flow_process(dead, tmp_path) as process:
        await lab.until_step(dead.name, 20)
        process.kill()
        await process.wait()
    assert gang_pids(lab, dead)  # it lives on, and nobody watches
    await lab.train(heir)
    lab.assert_as_undisturbed(heir)
    assert lab.verdicts(heir.name) == ["finished"]
    assert gang_pids(lab, dead) == []

    await lab.train(dead, take_over=True)
    lab.assert_as_undisturbed(dead)
    assert lab.verdicts(dead.name) == ["preempted", "finished"]
    assert "expired" in lab.events(dead.name, "attempt-ended")[0].detail["reason"]
    assert kinds(lab, dead, *GOT)[:3] == ["slice-intended", "slice-released", "slice-leased"]
    (lease,) = [lease for lease in await pool.leases() if lease.ready is not None]
    assert not overlaps(lease)


async def test_V10_busy_chips_of_a_pooled_slice_are_found_before_they_cost_a_failure(lab: Lab, pool: Pool):
    await pool.set(idle_minutes=5)
    first, second = (lab.numpy_run(name, steps=10, every=10) for name in ("fit", "after-unfit"))
    await lab.train(first)
    (lease,) = await pool.leases()
    await asyncio.to_thread(lab.emulator.busy_chips, lease.slice)
    await lab.train(second)
    lab.assert_as_undisturbed(second)
    assert lab.verdicts(second.name) == ["finished"]
    assert kinds(lab, second, *GOT) == [
        "slice-leased", "slice-deleted", "slice-intended", "slice-released",
    ]  # fmt: skip
    unfit, new = sorted(await pool.leases(), key=lambda lease: lease.created)
    assert (unfit.slice, unfit.state) == (lease.slice, LeaseState.GONE)
    assert "held by pid" in unfit.why
    assert lab.ready_nodes() == [new.slice]
