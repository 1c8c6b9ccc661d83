"""Ways to buy a slice beside spot: lives that end, zones without queues, repairs that pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from google.cloud import tpu_v2alpha1 as tpu

from tests.emulator.api import V4, ZONE, Api, api_of, node_name, parent, poll, refusal
from tests.emulator.test_rest import NODE, Rest
from tpu.emulator.client import ControlError
from tpu.emulator.emulator import Emulator


@pytest.fixture
async def api(emulator: Emulator) -> AsyncIterator[Api]:
    async with api_of(emulator) as opened:
        yield opened


def a_queued_resource(**fields: object) -> dict[str, object]:
    return {"tpu": {"nodeSpec": [{"nodeId": "q1", "node": NODE}]}, **fields}


FLEX_START = {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "2.5s"}}
CREATE = f"{parent()}/queuedResources?queuedResourceId=q1"


async def test_the_life_of_a_preemptible_node_ends_with_a_notice(api: Api, emulator: Emulator) -> None:
    emulator.set_life(0.4)
    emulator.set_notice_seconds(1.0)
    await api.create_node("spot", scheduling_config={"spot": True})
    made = await api.finish(await api.create_node("n1", scheduling_config={"preemptible": True}))
    assert made.scheduling_config == tpu.SchedulingConfig(preemptible=True)
    await poll(lambda: asyncio.to_thread(lambda: announced(emulator)), {"n1": True, "spot": False})
    await api.wait_node("n1", "PREEMPTED")
    assert emulator.preempted() == ["n1"]
    assert await api.node_state("spot") == "READY"


def announced(emulator: Emulator) -> dict[str, bool]:
    return {node["node"]: node["preemption_announced"] for node in emulator.nodes()}


async def test_a_preemptible_queued_resource_is_suspended_at_the_end_of_its_life(
    api: Api, emulator: Emulator
) -> None:
    emulator.set_life(0.3)
    emulator.set_notice_seconds(0)
    await api.create_queued("q1", tier={"best_effort": {}})
    await api.wait_queued("q1", "SUSPENDED")
    assert await api.node_state("q1-node") == "PREEMPTED"


async def test_a_node_that_was_deleted_is_not_preempted_at_the_end_of_its_life(
    api: Api, emulator: Emulator
) -> None:
    emulator.set_life(0.3)
    await api.finish(await api.create_node("n1", scheduling_config={"preemptible": True}))
    await api.delete_node("n1")
    emulator.set_life(60)
    await api.finish(await api.create_node("n1", scheduling_config={"preemptible": True}))
    await asyncio.sleep(0.4)  # longer than the first one would have lived
    assert await api.node_state("n1") == "READY"
    assert emulator.preempted() == []


async def test_flex_start_ends_when_it_has_run_for_as_long_as_was_asked(api: Api, emulator: Emulator) -> None:
    rest = Rest(emulator, "v2alpha1")
    rest.call("POST", CREATE, a_queued_resource(**FLEX_START))
    await api.wait_queued("q1", "ACTIVE")
    assert [node["provisioning"] for node in emulator.nodes()] == ["flex-start"]
    [queued] = emulator.queued_resources()
    assert queued["provisioning"] == "flex-start"
    shown = rest.call("GET", f"{parent()}/queuedResources/q1")
    assert shown["runDuration"]["terminationTime"]
    node = rest.call("GET", node_name("q1"))
    assert node["schedulingConfig"] == {"terminationTimestamp": shown["runDuration"]["terminationTime"]}
    with pytest.raises(ControlError, match="only spot and preemptible"):
        emulator.preempt("q1")
    await api.wait_queued("q1", "SUSPENDED")
    assert emulator.nodes() == []
    assert emulator.preempted() == []
    assert emulator.processes() == []


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"provisioningModel": "FLEX_START"}, "max_run_duration must be set"),
        ({**FLEX_START, "runDuration": {"maxRunDuration": "700000s"}}, "at most 7 days"),
        ({**FLEX_START, "spot": {}}, "cannot be combined with a tier"),
        ({"spot": {}, "runDuration": {"maxRunDuration": "60s"}}, "FLEX_START provisioning model only"),
        ({"provisioningModel": "STANDARD", "runDuration": {"maxRunDuration": "60s"}}, "only"),
    ],
)
def test_flex_start_is_refused(emulator: Emulator, wanted: dict[str, object], text: str) -> None:
    status, name, message = Rest(emulator, "v2alpha1").refusal("POST", CREATE, a_queued_resource(**wanted))
    assert (status, name) == (400, "INVALID_ARGUMENT")
    assert text in message


def test_a_plain_node_is_never_flex_start(emulator: Emulator) -> None:
    wanted = {**NODE, "schedulingConfig": {"provisioningModel": "FLEX_START"}}
    refused = Rest(emulator, "v2alpha1").refusal("POST", f"{parent()}/nodes?nodeId=n1", wanted)
    assert "queued resources only" in refused[2]


@pytest.mark.parametrize(
    ("model", "tier", "found"),
    [
        ("STANDARD", {"spot": {}}, "spot"),  # what gcloud alpha sends for --spot
        ("SPOT", {}, "spot"),
        ("RESERVATION_BOUND", {}, "reserved"),
        ("STANDARD", {}, "on-demand"),
        ("STANDARD", {"bestEffort": {}}, "preemptible"),
    ],
)
def test_models_and_tiers(emulator: Emulator, model: str, tier: dict[str, object], found: str) -> None:
    Rest(emulator, "v2alpha1").call("POST", CREATE, a_queued_resource(provisioningModel=model, **tier))
    assert emulator.queued_resources()[0]["provisioning"] == found


async def test_a_zone_without_queued_resources_has_plain_nodes(api: Api, emulator: Emulator) -> None:
    emulator.set_queues(ZONE, False)
    code, message = await refusal(api.create_queued("q1"))
    assert code == "INVALID_ARGUMENT"
    assert f'Queued resources are not supported in zone "{ZONE}"' in message
    await api.finish(await api.create_node("n1"))
    emulator.set_queues(ZONE, True)
    await api.create_queued("q1")
    with pytest.raises(ControlError, match="unknown zone 'mars'"):
        emulator.set_queues("mars", False)


@pytest.mark.parametrize(("maintenance", "reboot"), [(False, True), (False, False), (True, True)])
async def test_a_repair_passes(api: Api, emulator: Emulator, maintenance: bool, reboot: bool) -> None:
    emulator.set_capacity(ZONE, "v4-8", 1)
    await api.create_queued("q1", tier={"guaranteed": {"reserved": True}})
    await api.wait_queued("q1", "ACTIVE")
    address = emulator.nodes()[0]["hosts"][0]["address"]
    port = int(emulator.env["TPU_RELAY_SSH_PORT"])
    assert await greeting(address, port)
    emulator.repair("q1-node", 1.5, maintenance=maintenance, reboot=reboot)
    began = time.monotonic()
    node = await api.call("get_node", name=node_name("q1-node"))
    assert (node.state.name, node.health.name) == (
        ("READY", "UNHEALTHY_MAINTENANCE") if maintenance else ("REPAIRING", "HEALTH_UNSPECIFIED")
    )
    assert maintenance == (node.upcoming_maintenance.maintenance_status.name == "ONGOING")
    await poll(lambda: greeting(address, port), False)
    assert await api.queued_state("q1") == "ACTIVE"
    # Its place is not free for others meanwhile.
    with pytest.raises(Exception, match="no more capacity"):
        await api.finish(await api.create_node("n2"))
    await api.wait_node("q1-node", "READY")
    await poll(lambda: greeting(address, port), True)
    assert time.monotonic() - began >= 1.4
    node = await api.call("get_node", name=node_name("q1-node"))
    assert node.health.name == "HEALTHY"
    assert not node.upcoming_maintenance


async def greeting(address: str, port: int) -> bool:
    """True if an SSH server says what it is within a short time."""
    try:
        async with asyncio.timeout(0.3):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                return (await reader.readline()).startswith(b"SSH-2.0")
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return False


async def test_a_node_can_be_deleted_under_repair(api: Api, emulator: Emulator) -> None:
    await api.finish(await api.create_node("n1", **V4))
    emulator.repair("n1", 60)
    assert await api.node_state("n1") == "REPAIRING"
    await api.delete_node("n1")
    assert emulator.nodes() == []


async def test_what_is_not_repaired(api: Api, emulator: Emulator) -> None:
    await api.finish(await api.create_node("n1", scheduling_config={"spot": True}))
    with pytest.raises(ControlError, match="only on-demand and reserved nodes are repaired"):
        emulator.repair("n1", 1)
    await api.finish(await api.create_node("n2"))
    emulator.repair("n2", 60, maintenance=True)
    with pytest.raises(ControlError, match="n2 is under maintenance"):
        emulator.repair("n2", 1)
    emulator.set_node_state("n2", "STOPPED")
    with pytest.raises(ControlError, match="n2 is STOPPED"):
        emulator.repair("n2", 1)
