"""`relay stop`: with a driver that lives, with one that died, and with nothing to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.processes import killed_at_end
from tests.runs.conftest import Track, until
from tests.runs.terminal import relay_process
from tpu.checkpoint import files
from tpu.runs.config import RunConfig
from tpu.runs.controller import observe
from tpu.runs.event_log import load_events
from tpu.runs.tenure import StopRequested

# What drives a run in a process of its own, so that it can be killed.
DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.runs.conftest import Track
from tpu.runs.config import parse_run_config

class Cloud:
    env = dict(__import__("os").environ)

asyncio.run(Track(Cloud(), Path(sys.argv[2])).train(parse_run_config(__import__("json").loads(sys.argv[1]))))
"""


@contextlib.asynccontextmanager
async def driver_process(track: Track, run: RunConfig) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, run.model_dump_json(), str(track.folder),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with killed_at_end(process):
        yield process


def endless(track: Track, name: str) -> RunConfig:
    """So long that no test sees its end."""
    return track.numpy_run(name, steps=400, every=10, step_s=0.05)


async def test_a_living_driver_is_asked_saves_and_cleans_up(track: Track):
    run = endless(track, "asked")
    async with track.driving(run) as driver:
        await track.segment(driver, 10)
        stopping = asyncio.create_task(asyncio.to_thread(relay_process, "stop", "asked"))
        try:
            for stop in driver.record.segments[1:]:
                await track.segment(driver, stop)
        except StopRequested as error:
            # As the flow does.
            await driver.clean_up(str(error))
    answer = await stopping
    assert answer.code == 0, answer
    step = track.fence("asked").newest()
    assert step is not None
    assert f"asked process {os.getpid()} on" in answer.out
    assert f"python -m flows.train --resume asked goes on from step {step.step}" in answer.out
    ended = [e.detail for e in load_events(track.directory("asked")) if e.kind == "attempt-ended"]
    assert [(one["verdict"], one["last_commit"]) for one in ended] == [("cancelled", step.step)]
    track.assert_nothing_left()


async def test_a_run_whose_driver_died_is_stopped_and_goes_on_to_the_same_bits(track: Track):
    run = track.numpy_run("left", steps=200, every=10, step_s=0.05)
    run_dir = track.directory("left")
    async with driver_process(track, run) as process:
        await until(lambda: track.fence("left").newest(), "the first commit")
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert track.emulator.processes() != []  # the gang trains on

    answer = await asyncio.to_thread(relay_process, "stop", "left")
    assert answer.code == 0, answer
    track.assert_nothing_left()
    seen = observe(run_dir)
    assert seen is not None
    assert seen[0].released
    newest = track.fence("left").newest()
    assert newest is not None
    assert 10 <= newest.step < 200
    assert f"goes on from step {newest.step}" in answer.out
    ended = [e.detail for e in load_events(run_dir) if e.kind == "attempt-ended"]
    assert [(one["verdict"], one["last_commit"]) for one in ended] == [("cancelled", newest.step)]
    assert files.read(f"{run_dir}/report/report.md").startswith(b"# Run left: stopped by request\n")

    again = await asyncio.to_thread(relay_process, "stop", "left")
    assert again.out == answer.out.splitlines(keepends=True)[-1]  # nothing is left to do

    await asyncio.gather(track.train(run), track.train(track.numpy_run("undisturbed", steps=200, every=200)))
    assert track.digest("left") == track.digest("undisturbed")
    assert track.losses("left") == track.losses("undisturbed")
    track.assert_nothing_left()


async def test_a_slice_that_a_dead_driver_asked_for_is_deleted_and_not_waited_for(track: Track):
    track.emulator.set_delay(600)
    async with driver_process(track, endless(track, "early")) as process:
        await until(track.emulator.queued_resources, "the queued resource")
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with asyncio.timeout(60):
        answer = await asyncio.to_thread(relay_process, "stop", "early")
    assert answer.code == 0, answer
    assert "goes on from step 0" in answer.out
    track.assert_nothing_left()
