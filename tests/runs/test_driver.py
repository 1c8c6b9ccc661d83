"""The driver beside its slices: what it does when something dies between two of its steps."""

from __future__ import annotations

import time

import pytest

from tests.runs.conftest import Track
from tpu.runs.driver import START_REACH_S, AttemptEnded


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
