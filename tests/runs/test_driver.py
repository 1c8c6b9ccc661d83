"""The driver beside its slices: what it does when something dies between two of its steps."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.runs.conftest import Track, until
from tpu.runs.driver import START_REACH_S, AttemptEnded
from tpu.runs.event_log import load_events


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


async def test_a_cancellation_of_everything_still_lets_the_gang_save(track: Track):
    run = track.numpy_run("swept", steps=400, every=10, step_s=0.05, checkpoints={"every": 200})
    async with track.driving(run) as driver:
        await driver.provision()
        await driver.sync()
        await driver.start_attempt()
        await until(lambda: driver.view is not None and driver.view.step >= 5, "its first steps")
        # As an event loop does that ends because of an exception in it: a worker's signal raises one.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.1)
        await driver.clean_up("the worker ended")
    (ended,) = [e.detail for e in load_events(track.directory("swept")) if e.kind == "attempt-ended"]
    assert (ended["verdict"], ended["reason"]) == ("cancelled", "stopped: the worker ended")
    assert ended["last_commit"] >= 5
    track.assert_nothing_left()
