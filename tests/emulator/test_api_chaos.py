"""Many callers and much trouble at once: whatever the order, nothing is lost track of."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from google.api_core.exceptions import GoogleAPICallError

from tests.emulator.api import Api, api_of, node_name, parent, poll, queued_name
from tpu.emulator.client import ControlError
from tpu.emulator.emulator import Emulator


async def _live_and_die(api: Api, emulator: Emulator, chance: random.Random, number: int) -> None:
    """One slice: asked for, then preempted, killed, deleted or cut off at a random moment."""
    queued_id = f"q{number}"
    await api.create_queued(queued_id, accelerator_type=chance.choice(["v4-8", "v4-16"]))
    await asyncio.sleep(chance.random() * 0.3)  # not a wait for anything: the moment is what is random
    trouble = chance.choice(["preempt", "notice", "gone", "kill", "delete-node", "none"])
    node = f"{queued_id}-node"
    with suppress(ControlError, GoogleAPICallError):  # it may not be there yet, or be gone already
        if trouble == "preempt":
            await asyncio.to_thread(emulator.preempt, node)
        elif trouble == "notice":
            await asyncio.to_thread(emulator.preempt, node, True)
        elif trouble == "gone":
            await asyncio.to_thread(emulator.preempt, node, state="gone")
        elif trouble == "kill":
            await asyncio.to_thread(emulator.kill_host, node, 0)
        elif trouble == "delete-node":
            await api.call("delete_node", name=node_name(node))
    await asyncio.sleep(chance.random() * 0.2)
    await api.call("delete_queued_resource", name=queued_name(queued_id), force=True)


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_track_of(emulator: Emulator, seed: int):
    emulator.set_notice_seconds(0.2)
    emulator.set_capacity("us-central2-b", "v4-16", 2)  # some wait, and are deleted while they do
    chance = random.Random(seed)
    async with api_of(emulator) as api:
        lives = (_live_and_die(api, emulator, random.Random(chance.random()), i) for i in range(8))
        await asyncio.gather(*lives)

        async def left() -> tuple[int, int]:
            nodes = await api.call("list_nodes", parent=parent("-"))
            queued = await api.call("list_queued_resources", parent=parent("-"))
            return len(nodes.nodes), len(queued.queued_resources)

        await poll(left, (0, 0))
    assert await asyncio.to_thread(emulator.processes) == []
