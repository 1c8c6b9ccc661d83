"""What the built-in JAX trainer adds: schedules of extended runs, and profiles."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.runs.conftest import Track, until
from tests.runs.terminal import relay_process
from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.connection import Connection
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.event_log import load_events
from tpu.runs.record import extend
from tpu.runs.remote import ProfileFailed, profile_run


def icl(name: str, steps: int, **values: Any) -> RunConfig:
    """A model so small that it is compiled and trained in a moment."""
    return parse_run_config(
        {
            "name": name,
            "training": {
                "workload": {
                    "kind": "icl",
                    "dimensions": 2,
                    "examples": 4,
                    "tasks": 4,
                    "batch": 8,
                    "model": {"layers": 1, "width": 16, "heads": 2},
                },
                "optimizer": {"schedule": "triangle"},
                "schedule_steps": 100,
            },
            "steps": steps,
            "evaluate": "never",
        }
        | values
    )


@pytest.mark.slow  # an extended run of the NumPy trainer is in the short form
async def test_an_extended_run_has_the_bits_of_a_long_one_in_jax(track: Track):
    cut = {"checkpoints": {"every": 20}}
    await asyncio.gather(track.train(icl("long", 80, **cut)), track.train(icl("short", 40, **cut)))
    await track.train(extend(track.directory("short"), 80).config)
    digests = [run_digest(track.directory(name)) for name in ("long", "short")]
    assert digests[0] == digests[1]
    assert track.losses("short") == track.losses("long")
    track.assert_nothing_left()


@pytest.mark.slow
async def test_G6_two_runs_on_the_halves_of_one_host_at_once_have_the_same_bits(track: Track):
    half = {"slice": {"chips": 2}}
    await asyncio.gather(track.train(icl("left", 40, **half)), track.train(icl("right", 40, **half)))
    held = []
    for name in ("left", "right"):
        got = [e.detail for e in load_events(track.directory(name)) if "chips" in e.detail]
        held.append((got[-1]["slice"], got[-1]["chips"]))  # an intent before it may have been withdrawn
    (slice, chips), (other, others) = sorted(held, key=lambda one: one[1])
    assert (slice, chips, others) == (other, [0, 1], [2, 3])
    assert track.digest("left") == track.digest("right")
    assert track.losses("left") == track.losses("right")
    track.assert_nothing_left()


@pytest.mark.slow
async def test_a_profile_of_the_next_steps_comes_into_the_bucket(track: Track):
    run = icl("traced", 10**7, checkpoints={"every": 10**6})
    async with track.driving(run) as driver:
        try:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
            await until(lambda: driver.view and driver.view.step, "the first step")
            answer = await asyncio.to_thread(relay_process, "profile", "traced", "--steps", "30")
            after = await until(lambda: driver.view and driver.view.step, "a step")
            await until(lambda: driver.view and driver.view.step > after, "that it trains on")
        finally:
            await driver.clean_up("done")
    assert answer.code == 0, answer
    url = next(line for line in answer.out.splitlines() if line.startswith("gs://"))
    assert url.startswith(f"{track.directory('traced')}/profiles/1/")
    found = files.names(url)
    assert [name for name in found if name.endswith(".xplane.pb")]
    trace = next(name for name in found if name.endswith(".trace.json.gz"))
    events = json.loads(gzip.decompress(files.read(trace)))["traceEvents"]
    assert len(events) > 10
    track.assert_nothing_left()


async def test_an_attempt_that_ends_before_the_trace_is_done_is_said_so(track: Track):
    run = track.numpy_run("deaf", steps=80, every=80, step_s=0.05)  # this trainer looks for no request
    heard: list[str] = []
    async with track.driving(run) as driver:
        try:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
            await until(lambda: driver.view and driver.view.step, "the first step")
            connection = Connection.from_environment(track.emulator.env)
            asked = asyncio.create_task(profile_run(connection, track.directory("deaf"), 20, heard.append))
            await driver.wait_for_commit(80)
            with pytest.raises(
                ProfileFailed, match="attempt 1 ended before it began the trace; ask its successor"
            ):
                await asked
        finally:
            await driver.clean_up("done")
    assert heard == ["asked attempt 1 of deaf to trace 20 steps"]
