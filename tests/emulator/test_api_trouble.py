"""Trouble on demand: what the API, the hosts and the processes show of it."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from typing import Any

import pytest

from tests.emulator.api import ZONE, Api, api_of, node_name, parent, poll, refusal
from tpu.emulator.client import ControlClient, ControlError
from tpu.emulator.emulator import Emulator

SPOT: dict[str, Any] = {"scheduling_config": {"spot": True}}


@pytest.fixture
async def api(emulator: Emulator):
    async with api_of(emulator) as opened:
        yield opened


def metadata_says_preempted(address: str) -> bool:
    """Ask a host's metadata server as a supervisor would."""
    port = _metadata_port(address)
    request = urllib.request.Request(
        f"http://{address}:{port}/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
        return answer.read() == b"TRUE"


def _metadata_port(address: str) -> int:
    """Find the port in the environment of a process of the host at this address."""
    wanted = f"GCE_METADATA_HOST={address}:".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue
        for entry in entries:
            if entry.startswith(wanted):
                return int(entry.rpartition(b":")[2])
    raise AssertionError(f"no process belongs to the host at {address}")


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "STOPPED", "UNKNOWN"])
async def test_a_preempted_node_may_show_other_states(api: Api, emulator: Emulator, state: str):
    await api.finish(await api.create_node("n", **SPOT))
    emulator.preempt("n", state=state)
    assert await api.node_state("n") == state
    assert emulator.processes() == []
    await api.delete_node("n")


async def test_a_preempted_node_may_be_gone(api: Api, emulator: Emulator):
    await api.create_queued("q")
    await api.wait_queued("q", "ACTIVE")
    emulator.preempt("q-node", state="gone")
    assert (await refusal(api.call("get_node", name=node_name("q-node"))))[0] == "NOT_FOUND"
    await api.wait_queued("q", "SUSPENDED")
    assert emulator.processes() == []
    await api.delete_queued("q")


async def test_a_notice_comes_before_the_end(api: Api, emulator: Emulator):
    script = "#!/bin/bash\nwhile true; do sleep 1; done\n"  # a process that shows the host's environment
    await api.finish(await api.create_node("n", **SPOT, metadata={"startup-script": script}))
    emulator.set_notice_seconds(1)
    address = emulator.nodes()[0]["hosts"][0]["address"]
    await poll(lambda: _async(lambda: metadata_says_preempted(address)), False)
    begun = time.monotonic()
    emulator.preempt("n", notice=True)
    assert metadata_says_preempted(address)
    assert await api.node_state("n") == "READY"
    assert emulator.processes()
    await api.wait_node("n", "PREEMPTED")
    assert time.monotonic() - begun >= 0.9
    await poll(lambda: _async(emulator.processes), [])


async def _async(look):
    return await asyncio.to_thread(look)


async def test_a_notice_can_be_cut_short_by_the_real_end_or_deletion(api: Api, emulator: Emulator):
    for node_id in ("a", "b"):
        await api.finish(await api.create_node(node_id, **SPOT))
        emulator.preempt(node_id, notice=True)
    emulator.preempt("a")
    assert await api.node_state("a") == "PREEMPTED"
    await api.delete_node("b")
    assert emulator.processes() == []


async def test_a_preempted_process_may_live_on(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n", **SPOT))
    emulator.preempt("n", linger_s=60)
    await api.wait_node("n", "PREEMPTED")
    assert emulator.processes()
    await api.delete_node("n")
    assert emulator.processes() == []


async def test_one_host_dies_and_the_api_says_nothing(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n", accelerator_type="v4-16"))
    before = len(emulator.processes())
    emulator.kill_host("n", 1)
    assert 0 < len(emulator.processes()) < before
    assert await api.node_state("n") == "READY"
    await api.delete_node("n")
    assert emulator.processes() == []


async def test_a_hung_host_can_be_resumed_or_deleted(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n"))
    emulator.hang_host("n")
    states = {_state(pid) for pid in emulator.processes()}
    assert states == {"T"}
    emulator.resume_host("n")
    assert "T" not in {_state(pid) for pid in emulator.processes()}
    emulator.hang_host("n")
    await api.delete_node("n")
    assert emulator.processes() == []


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


async def test_any_state_can_be_shown(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n"))
    emulator.set_node_state("n", "REPAIRING")
    node = await api.call("get_node", name=node_name("n"))
    assert (node.state.name, node.health.name) == ("REPAIRING", "HEALTH_UNSPECIFIED")
    assert emulator.processes()
    emulator.set_node_state("n", "READY")
    assert (await api.call("get_node", name=node_name("n"))).health.name == "HEALTHY"


async def test_a_schedule_preempts_the_same_nodes_in_the_same_order(api: Api, emulator: Emulator):
    orders = []
    for _ in range(2):
        emulator.reset()
        for node_id in ("a", "b", "c", "d"):
            await api.finish(await api.create_node(node_id, **SPOT))
        emulator.schedule_preemptions(seed=5, mean_s=0.3, count=4)
        await poll(lambda: _async(lambda: len(emulator.preempted())), 4)
        orders.append(emulator.preempted())
    assert orders[0] == orders[1]


async def test_a_schedule_waits_for_a_node_and_can_be_stopped(api: Api, emulator: Emulator):
    emulator.schedule_preemptions(seed=1, mean_s=0.01, notice="never", count=1)
    await api.finish(await api.create_node("od"))
    await api.create_node("s", **SPOT)
    await api.wait_node("s", "PREEMPTED")
    assert await api.node_state("od") == "READY"
    emulator.schedule_preemptions(seed=1, mean_s=0.01)
    emulator.stop_schedule()
    await api.finish(await api.create_node("t", **SPOT))
    assert await api.node_state("t") == "READY"


async def test_calls_fail_as_asked_and_then_no_more(api: Api, emulator: Emulator):
    emulator.fail_next("ListNodes", "UNAVAILABLE", "the network is gone", times=2)
    for _ in range(2):
        assert await refusal(api.call("list_nodes", parent=parent())) == (
            "UNAVAILABLE",
            "the network is gone",
        )
    await api.call("list_nodes", parent=parent())


async def test_only_the_answer_may_be_lost(api: Api, emulator: Emulator):
    emulator.fail_next("CreateNode", 14, "connection reset", after=True)
    assert (await refusal(api.create_node("n")))[0] == "UNAVAILABLE"
    await api.wait_node("n", "READY")


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda e: e.preempt("none"), "no node 'none'; there are: n"),
        (lambda e: e.preempt("n"), "only spot and preemptible nodes are preempted"),
        (lambda e: e.preempt("n", state="READY"), "unknown state 'READY' of a preempted node"),
        (lambda e: e.kill_host("n", 7), "has no host 7; it has [0]"),
        (lambda e: e.set_node_state("n", "BROKEN"), "unknown node state 'BROKEN'"),
        (lambda e: e.set_capacity(ZONE, "v6e-8", 1), "'v6e-8' is not offered in us-central2-b"),
        (lambda e: e.set_capacity("nowhere", "v4-8", 1), "unknown zone 'nowhere'"),
        (lambda e: e.set_capacity(ZONE, "v4-8", -1), "greater than or equal to 0"),
        (lambda e: e.set_delay(-1), "greater than or equal to 0"),
        (lambda e: e.fail_next("Nothing", 14, ""), "unknown method 'Nothing'"),
        (lambda e: e.fail_next("GetNode", "NO_CODE", ""), "unknown status code 'NO_CODE'"),
        (lambda e: e.schedule_preemptions(0, 0), "mean_s must be more than 0"),
    ],
)
async def test_impossible_trouble_is_refused_with_a_reason(api: Api, emulator: Emulator, ask, text: str):
    await api.finish(await api.create_node("n"))
    with pytest.raises(ControlError) as caught:
        ask(emulator)
    assert text in str(caught.value)


def test_control_wants_the_key(emulator: Emulator):
    with pytest.raises(ControlError, match="wrong or no key"):
        ControlClient(emulator.record.control, "guess").reset()


async def test_reset_forgets_everything(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    emulator.set_quota(ZONE, "v4-8", 5)
    await api.create_queued("making")
    await api.create_node("n", **SPOT)
    emulator.set_delay(0)
    await api.create_queued("made")
    await api.wait_queued("made", "ACTIVE")
    emulator.preempt("made-node", notice=True)
    emulator.fail_next("ListNodes", 14, "away", times=100)
    emulator.set_delete_delay(60)
    begun = time.monotonic()
    emulator.reset()
    assert time.monotonic() - begun < 5
    status = emulator.status()
    assert (status["nodes"], status["queued_resources"], emulator.processes()) == ([], [], [])
    assert status["settings"]["quota"] == {}
    assert status["settings"]["notice_s"] == 30
    await api.call("list_nodes", parent=parent())
    await api.create_queued("made")
    await api.wait_queued("made", "ACTIVE")


def test_reset_empties_the_bucket(emulator: Emulator):
    def call(path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(emulator.env["STORAGE_EMULATOR_HOST"] + path, data=data)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.read()

    upload = "/upload/storage/v1/b/relay-emulated/o?uploadType=media&name=runs/a/run.json"
    for _ in range(2):
        call(upload, b"{}")
        assert b"runs/a/run.json" in call("/storage/v1/b/relay-emulated/o")
        emulator.reset()
        assert b"runs/a/run.json" not in call("/storage/v1/b/relay-emulated/o")
