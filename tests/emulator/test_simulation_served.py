"""A simulated fleet behind the real API: real clients see hours pass in seconds."""

import asyncio
import time
from collections import Counter

import pytest

from tests.emulator.api import ZONE, Api, api_of, poll
from tpu.emulator.__main__ import main
from tpu.emulator.emulator import Emulator


async def states(api: Api) -> Counter[str]:
    found = await api.call("list_nodes", parent=f"projects/relay-emulated/locations/{ZONE}")
    return Counter(node.state.name for node in found.nodes)


async def test_slices_boot_and_die_by_a_clock_that_runs_faster():
    with Emulator(speed=2000) as emulator:
        async with api_of(emulator) as api:
            began = time.monotonic()
            await asyncio.gather(*(api.create_queued(f"slice-{i}") for i in range(60)))
            await poll(lambda: _seen_ready(api, emulator, 60), True)
            await poll(lambda: _dead(api, 30), True)  # a mean life of 6 hours is 11 seconds
            assert time.monotonic() - began < 60
        assert emulator.processes() == []
        emulator.reset()
        assert emulator.nodes() == []


async def _seen_ready(api: Api, emulator: Emulator, count: int) -> bool:
    seen = await states(api)
    return seen["READY"] + seen["PREEMPTED"] >= count


async def _dead(api: Api, count: int) -> bool:
    return (await states(api))["PREEMPTED"] >= count


def test_an_impossible_speed_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--simulated", "--speed", "0"])
    assert "at most 10000" in capsys.readouterr().err
