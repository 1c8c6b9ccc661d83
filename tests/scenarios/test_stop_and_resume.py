"""`relay stop` on a run that the flow drives, and `python -m flows.train --resume` behind it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.runs.terminal import relay_process
from tests.scenarios.conftest import Lab


@pytest.mark.slow
async def test_a_run_that_was_stopped_goes_on_to_the_same_bits(lab: Lab, tmp_path: Path):
    # Slow enough that it is still on its way when a busy machine has started `relay stop`.
    run = lab.numpy_run("paused", steps=200, every=10, step_s=0.3, variables={"NUMPY_SLOW_ATTEMPT": "1"})
    async with lab.cold_process(run, tmp_path) as flow:
        await lab.until_step("paused", 10)
        stopped, (said, _) = await asyncio.gather(
            asyncio.to_thread(relay_process, "stop", "paused"), flow.communicate()
        )
    assert stopped.code == 0, stopped
    assert "stopped: no gang and no slice is left" in stopped.out
    assert b"stopped by request" in said
    assert flow.returncode != 0
    assert 10 <= lab.newest_step("paused") < 200
    assert lab.verdicts("paused") == ["cancelled"]
    lab.assert_nothing_left()

    resumed = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flows.train", "--resume", "paused",
        env=os.environ | lab.environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await resumed.communicate()
    assert resumed.returncode == 0, said.decode()
    lab.assert_as_undisturbed(run)
    assert lab.verdicts("paused") == ["cancelled", "finished"]
