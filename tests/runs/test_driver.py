"""The driver beside its slices: what it does when something dies between two of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.runs.conftest import Track, until
from tpu.hosts.connect import HostUnreachable
from tpu.runs.driver import START_REACH_S, AttemptEnded, RunDriver
from tpu.runs.event_log import load_events
from tpu.runs.sync import SyncError


async def test_a_host_that_dies_before_the_gang_has_started_is_not_waited_for_like_one_that_boots(
    track: Track,
):
    run = track.numpy_run("stillborn", steps=20)
    async with track.driving(run) as driver:
        ready = await driver.provision()
        await driver.sync()
        # The cloud goes on saying READY.
        track.emulator.kill_host(ready.name)
        began = time.monotonic()
        await driver.start_attempt()
        with pytest.raises(AttemptEnded, match="infrastructure") as ended:
            await driver.wait_for_commit(20)
        assert ended.value.retry
        assert time.monotonic() - began < START_REACH_S + 30
        await driver.clean_up("the test is done with it")
    track.assert_nothing_left()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("given_up", [True, False])
async def test_a_slice_that_the_dead_driver_had_given_up_is_not_taken_up(
    track: Track, given_up: bool, trained: bool
):
    name = f"{'trained' if trained else 'prepared'}-{'unfit' if given_up else 'fit'}"
    failure = {} if given_up else {"NUMPY_FAIL": "exception@3"}
    kind = {"accelerator_type": "v4-16"}
    run = track.numpy_run(name, steps=400, every=100, step_s=0.05, variables=failure, slice=kind)
    async with track.driving(run) as driver:
        ready = await driver.provision()
        await driver.sync()
        # It dies with the verdict written down, and before it has done what follows from it.
        driver._slices.delete = lambda name, why: asyncio.Event().wait()  # type: ignore[method-assign]
        if trained:
            await driver.start_attempt()
            if given_up:  # else it fails by itself at its third step
                await until(lambda: driver.view is not None and driver.view.step >= 1, "its first step")
                track.emulator.kill_host(ready.name, 1)
            await until(lambda: any(e.kind == "attempt-ended" for e in driver.log.events), "the verdict")
        else:
            lost, refused = HostUnreachable({f"{ready.name}-w-1": "no answer"}), SyncError("not to its taste")
            preparing = asyncio.create_task(fail_to_prepare(driver, lost if given_up else refused))
            await until(lambda: any(e.kind == "attempt-ended" for e in driver.log.events), "the verdict")
            preparing.cancel()
    async with track.driving(run) as driver:
        assert [node["node"] for node in track.emulator.nodes()] == ([] if given_up else [ready.name])
        await driver.clean_up("the test is done with it")
    track.assert_nothing_left()


async def fail_to_prepare(driver: RunDriver, error: Exception) -> None:
    with contextlib.suppress(AttemptEnded):
        async with driver.preparing():
            raise error


async def test_a_connection_that_drops_while_the_code_is_brought_costs_no_slice(track: Track, tmp_path: Path):
    shutil.copytree(track.folder / "tests", tmp_path / "tests")
    (tmp_path / "data.bin").write_bytes(os.urandom(40 * 2**20))
    run = track.numpy_run("dropped", steps=4, checkpoints={"every": 4})
    said: list[str] = []
    async with track.driving(run, said.append, tmp_path) as driver:
        ready = await driver.provision()
        sync = asyncio.create_task(driver.sync())
        # The first of its bytes are on the host.
        await until(lambda: any(line.startswith("sync: ") for line in said), "the sync")
        track.emulator.kill_ssh(ready.name)
        await sync
        assert any(line.startswith("bringing the code once more") for line in said)
        await driver.start_attempt()
        await driver.wait_for_commit(4)
        await driver.clean_up("the test is done with it")
    assert len([e for e in load_events(track.directory("dropped")) if e.kind == "slice-intended"]) == 1
    track.assert_nothing_left()


async def test_a_cancellation_of_everything_still_lets_the_gang_save(track: Track):
    run = track.numpy_run("swept", steps=400, every=10, step_s=0.05, checkpoints={"every": 200})
    async with track.driving(run) as driver:
        await driver.provision()
        await driver.sync()
        await driver.start_attempt()
        await until(lambda: driver.view is not None and driver.view.step >= 5, "its first steps")
        assert driver._attempt_task is not None
        # As an event loop does that ends because of an exception in it: a worker's signal raises one.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait({driver._attempt_task})
        await driver.clean_up("the worker ended")
    (ended,) = [e.detail for e in load_events(track.directory("swept")) if e.kind == "attempt-ended"]
    assert (ended["verdict"], ended["reason"]) == ("cancelled", "stopped: the worker ended")
    assert ended["last_commit"] >= 5
    track.assert_nothing_left()
