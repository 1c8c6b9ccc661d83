"""Queued resources through a real client: waiting, made, suspended, deleted, and what is refused."""

from __future__ import annotations

import uuid

import pytest
from google.cloud import tpu_v2alpha1 as tpu
from google.protobuf import duration_pb2

from tests.emulator.api import V4, ZONE, Api, api_of, node_name, parent, poll, queued_name, refusal
from tpu.emulator.emulator import Emulator


@pytest.fixture
async def api(emulator: Emulator):
    async with api_of(emulator) as opened:
        yield opened


async def failure(api: Api, queued_id: str) -> tuple[int, str]:
    """Return code and message of a queued resource that comes to be FAILED."""
    await api.wait_queued(queued_id, "FAILED")
    found = await api.call("get_queued_resource", name=queued_name(queued_id))
    return found.state.failed_data.error.code, found.state.failed_data.error.message


async def test_a_queued_resource_becomes_a_node_and_is_deleted_by_force(api: Api, emulator: Emulator):
    accepted = await api.finish(await api.create_queued("q", labels={"pool": "a"}))
    assert isinstance(accepted, tpu.QueuedResource)
    await api.wait_queued("q", "ACTIVE")
    node = await api.call("get_node", name=node_name("q-node"))
    assert node.state.name == "READY"
    assert node.queued_resource == queued_name("q")
    assert node.scheduling_config.spot
    assert dict(node.labels) == {"pool": "a"}

    code, text = await refusal(api.call("delete_queued_resource", name=queued_name("q"), force=False))
    assert code == "FAILED_PRECONDITION"
    assert node_name("q-node") in text
    assert isinstance(await api.delete_queued("q"), tpu.QueuedResource)
    for look in (
        api.call("get_queued_resource", name=queued_name("q")),
        api.call("get_node", name=node_name("q-node")),
    ):
        assert (await refusal(look))[0] == "NOT_FOUND"
    assert emulator.processes() == []


async def test_several_nodes_are_made_at_once_and_suspended_together(api: Api, emulator: Emulator):
    spec = {
        "parent": parent(),
        "multi_node_params": {"node_count": 2, "node_id_prefix": "slice"},
        "node": V4,
    }
    await api.call(
        "create_queued_resource",
        parent=parent(),
        queued_resource_id="q",
        queued_resource=tpu.QueuedResource({"tpu": {"node_spec": [spec]}, "spot": {}}),
    )
    await api.wait_queued("q", "ACTIVE")
    nodes = await api.call("list_nodes", parent=parent())
    assert [node.name for node in nodes.nodes] == [node_name("slice-0"), node_name("slice-1")]
    assert all(node.multislice_node for node in nodes.nodes)
    emulator.preempt("slice-1")
    await api.wait_queued("q", "SUSPENDED")
    assert await api.node_state("slice-0") == "PREEMPTED"
    assert emulator.processes() == []
    await api.delete_queued("q")
    assert emulator.nodes() == []


async def test_it_waits_for_capacity_and_gets_it_when_another_is_deleted(api: Api, emulator: Emulator):
    emulator.set_capacity(ZONE, "v4-8", 1)
    await api.create_queued("first")
    await api.wait_queued("first", "ACTIVE")
    await api.create_queued("second")
    assert await api.queued_state("second") == "WAITING_FOR_RESOURCES"
    waiting = emulator.queued_resources()[1]
    assert "1 of 1 slices of v4-8 in us-central2-b are in use" in waiting["waits_for"]
    await api.delete_queued("first")
    await api.wait_queued("second", "ACTIVE")


async def test_a_preempted_node_gives_its_capacity_back_but_not_its_quota(api: Api, emulator: Emulator):
    emulator.set_capacity(ZONE, "v4-8", 1)
    emulator.set_quota(ZONE, "v4-8", 2)
    await api.create_queued("first")
    await api.wait_queued("first", "ACTIVE")
    emulator.preempt("first-node")
    await api.wait_queued("first", "SUSPENDED")
    await api.create_queued("second")
    await api.wait_queued("second", "ACTIVE")
    assert await refusal(api.create_queued("third")) == (
        "RESOURCE_EXHAUSTED",
        "Quota 'TPUV4sPreemptiblePerProjectPerRegionForTPUAPI' exhausted. Limit 2 in zone us-central2-b",
    )
    await api.delete_queued("first", force=False)
    await api.create_queued("third")


async def test_more_capacity_wakes_those_who_wait(api: Api, emulator: Emulator):
    emulator.set_capacity(ZONE, "v4-8", 0)
    await api.create_queued("q")
    assert await api.queued_state("q") == "WAITING_FOR_RESOURCES"
    emulator.set_capacity(ZONE, "v4-8", None)
    await api.wait_queued("q", "ACTIVE")


async def test_a_stockout_fails_queued_resources_and_nodes(api: Api, emulator: Emulator):
    emulator.stockout(ZONE, "v4-8")
    await api.create_queued("q")
    code, text = await failure(api, "q")
    assert code == 8
    assert 'There is no more capacity in the zone "us-central2-b"' in text
    operation = await api.create_node("n")  # the call is accepted, its operation fails
    found = await api.operation(operation.operation.name)
    assert (found.error.code, found.error.message) == (8, text)
    emulator.stockout(ZONE, "v4-8", on=False)
    await api.finish(await api.create_node("n"))
    await api.delete_queued("q", force=False)


async def test_no_quota_at_all(api: Api, emulator: Emulator):
    emulator.set_quota("us-east5-b", "v6e-8", 0)
    for tier, name in (({"spot": {}}, "TPUV6EPreemptible"), ({"guaranteed": {}}, "TPUV6E")):
        code, text = await refusal(
            api.create_queued(
                "q", "us-east5-b", tier, accelerator_type="v6e-8", runtime_version="v2-alpha-tpuv6e"
            )
        )
        assert code == "RESOURCE_EXHAUSTED"
        assert text == (
            f"Quota limit '{name}PerProjectPerRegionForTPUAPI' has been exceeded. "
            "Limit: 0 in region us-east5."
        )


async def test_a_full_reservation(api: Api, emulator: Emulator):
    emulator.set_reservation(ZONE, "v4-8", 1)
    for queued_id in ("a", "b"):
        await api.create_queued(queued_id, tier={"guaranteed": {"reserved": True}})
    await api.wait_queued("a", "ACTIVE")
    code, text = await failure(api, "b")
    assert code == 8
    assert text.startswith("Insufficient reserved capacity.")


async def test_creations_a_minute_are_limited(api: Api, emulator: Emulator):
    emulator.set_creation_rate(2)
    await api.create_queued("a")
    await api.create_node("b")
    code, text = await refusal(api.create_node("c"))
    assert code == "RESOURCE_EXHAUSTED"
    assert text.startswith("Maximum number of CreateNode requests per minute")


async def test_it_fails_when_its_time_is_over(api: Api, emulator: Emulator):
    emulator.set_capacity(ZONE, "v4-8", 0)
    until = {
        "spot": {},
        "queueing_policy": {"valid_until_duration": duration_pb2.Duration(nanos=200_000_000)},
    }
    await api.create_queued("q", tier=until)
    code, text = await failure(api, "q")
    assert code == 4
    assert "no capacity came" in text


async def test_it_is_not_made_before_its_time(api: Api):
    after = {"spot": {}, "queueing_policy": {"valid_after_duration": duration_pb2.Duration(seconds=60)}}
    await api.create_queued("q", tier=after)
    assert await api.queued_state("q") == "WAITING_FOR_RESOURCES"
    await api.delete_queued("q", force=False)


async def test_names_stay_taken_until_deleted(api: Api, emulator: Emulator):
    await api.create_queued("q")
    await api.wait_queued("q", "ACTIVE")
    emulator.preempt("q-node")
    await api.wait_queued("q", "SUSPENDED")
    assert await refusal(api.create_queued("q")) == (
        "ALREADY_EXISTS",
        f"Resource '{queued_name('q')}' already exists",
    )
    code, text = await refusal(api.create_node("q-node"))
    assert (code, text) == ("ALREADY_EXISTS", f"Resource '{node_name('q-node')}' already exists")
    await api.delete_queued("q")
    await api.create_queued("q")
    await api.wait_queued("q", "ACTIVE")


async def test_a_node_id_is_taken_before_the_node_is_made(api: Api, emulator: Emulator):
    emulator.set_capacity(ZONE, "v4-8", 0)
    await api.create_queued("q")
    assert (await refusal(api.create_node("q-node")))[0] == "ALREADY_EXISTS"


async def test_deleting_its_node_suspends_it(api: Api):
    await api.create_queued("q")
    await api.wait_queued("q", "ACTIVE")
    await api.delete_node("q-node")
    await api.wait_queued("q", "SUSPENDED")
    found = await api.call("get_queued_resource", name=queued_name("q"))
    assert found.state.state_initiator.name == "USER"
    await api.delete_queued("q", force=False)


async def test_a_suspended_one_can_be_reset(api: Api, emulator: Emulator):
    await api.create_queued("q")
    await api.wait_queued("q", "ACTIVE")
    code, _ = await refusal(api.call("reset_queued_resource", name=queued_name("q")))
    assert code == "FAILED_PRECONDITION"
    emulator.preempt("q-node")
    await api.wait_queued("q", "SUSPENDED")
    again = await api.finish(await api.call("reset_queued_resource", name=queued_name("q")))
    assert isinstance(again, tpu.QueuedResource)
    await api.wait_queued("q", "ACTIVE")
    assert await api.node_state("q-node") == "READY"


async def test_deleted_while_being_made(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    await api.create_queued("q")
    await api.wait_queued("q", "PROVISIONING")
    assert await api.node_state("q-node") == "CREATING"
    assert (await refusal(api.call("delete_queued_resource", name=queued_name("q"))))[0] == (
        "FAILED_PRECONDITION"
    )
    await api.delete_queued("q")
    assert (emulator.nodes(), emulator.queued_resources()) == ([], [])


async def test_preempted_while_being_made(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    await api.create_queued("q")
    await api.wait_node_exists("q-node")
    emulator.preempt("q-node")
    await api.wait_queued("q", "SUSPENDED")
    assert await api.node_state("q-node") == "PREEMPTED"
    node = tpu.Node(name=node_name("q-node"), labels={"a": "b"})
    code, text = await refusal(api.call("update_node", node=node, update_mask={"paths": ["labels"]}))
    assert code == "INVALID_ARGUMENT"
    assert text.startswith(
        "Cloud TPU received a bad request. update is not supported while in state PREEMPTED"
    )


async def test_the_same_request_id_makes_one(api: Api, emulator: Emulator):
    request = {
        "parent": parent(),
        "queued_resource_id": "q",
        "queued_resource": tpu.QueuedResource(
            {"tpu": {"node_spec": [{"parent": parent(), "node_id": "n", "node": V4}]}, "spot": {}}
        ),
        "request_id": str(uuid.uuid4()),
    }
    names = {(await api.call("create_queued_resource", **request)).operation.name for _ in range(3)}
    assert len(names) == 1
    request["request_id"] = str(uuid.uuid4())
    assert (await refusal(api.call("create_queued_resource", **request)))[0] == "ALREADY_EXISTS"
    request["request_id"] = "once more"
    assert (await refusal(api.call("create_queued_resource", **request)))[0] == "INVALID_ARGUMENT"


async def test_lists_come_in_pages(api: Api):
    for queued_id in ("b", "a", "c"):
        await api.create_queued(queued_id)
    found = await api.call("list_queued_resources", parent=parent(), page_size=2)
    names = [one.name async for one in found]  # the client's own pager asks for the rest
    assert names == [queued_name("a"), queued_name("b"), queued_name("c")]


async def test_on_demand_is_never_preempted(api: Api, emulator: Emulator):
    await api.create_queued("q", tier={"guaranteed": {}})
    await api.wait_queued("q", "ACTIVE")
    with pytest.raises(RuntimeError, match="only spot and preemptible nodes are preempted"):
        emulator.preempt("q-node")
    await poll(lambda: api.queued_state("q"), "ACTIVE")
