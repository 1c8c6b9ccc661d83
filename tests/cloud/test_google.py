"""The client against the emulator's API server: calls, repetition, errors, deadlines."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import grpc
import pytest
from google.cloud import tpu_v2alpha1 as api
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport

from tpu.cloud import (
    CloudError,
    ErrorKind,
    NodeRequest,
    NodeState,
    QueuedResource,
    QueuedResourceRequest,
    QueuedResourceState,
)
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import GoogleTpuCloud, open_cloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator

ZONE = "us-central2-b"
V4_8 = NodeRequest(
    accelerator_type="v4-8",
    runtime_version="tpu-ubuntu2204-base",
    provisioning="spot",
    intent="0123456789abcdef",
    metadata={"startup-script": "true"},
    labels={"relay-pool": "test"},
)


async def active(cloud: GoogleTpuCloud, name: str) -> QueuedResource:
    async with asyncio.timeout(30):
        while True:
            found = await cloud.get_queued_resource(ZONE, name)
            if found.state is QueuedResourceState.ACTIVE:
                return found
            assert found.state is not QueuedResourceState.FAILED, found
            await asyncio.sleep(0.02)


async def gone(cloud: GoogleTpuCloud, name: str) -> None:
    async with asyncio.timeout(30):
        while name in [q.name for q in await cloud.list_queued_resources(ZONE)]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    with pytest.raises(CloudError) as caught:
        await cloud.get_queued_resource(ZONE, name)
    assert caught.value.kind is ErrorKind.NOT_FOUND


async def test_a_queued_resource_from_request_to_deletion(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    made = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    assert (made.name, made.zone, made.accelerator_type, made.spot) == ("s1", ZONE, "v4-8", True)
    await active(cloud, "s1")

    node = await cloud.get_node(ZONE, "s1")
    assert node.state is NodeState.READY
    assert node.queued_resource == "s1"
    assert node.labels == {"relay-pool": "test", "relay-intent": V4_8.intent}
    assert len(node.endpoints) == 1
    assert node.endpoints[0].internal
    assert node.created is not None
    assert abs(node.created - time.time()) < 60
    identities = await cloud.host_identities(ZONE, "s1")
    assert identities[0].key.startswith("ssh-ed25519 AAAA")

    assert [found.name for found in await cloud.list_nodes(ZONE)] == ["s1"]
    assert [found.name for found in await cloud.list_queued_resources(ZONE)] == ["s1"]
    emulator.set_delete_delay(0.3)
    await cloud.delete_queued_resource(ZONE, "s1")
    await cloud.delete_queued_resource(ZONE, "s1")
    await gone(cloud, "s1")
    assert await cloud.list_nodes(ZONE) == []
    await cloud.delete_queued_resource(ZONE, "s1")


async def test_creating_again_is_a_success_for_the_same_intent_only(cloud: GoogleTpuCloud) -> None:
    first = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    again = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    assert (again.name, again.created) == (first.name, first.created)

    other = QueuedResourceRequest(dataclasses.replace(V4_8, intent="fedcba"))
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(ZONE, "s1", other)
    assert caught.value.kind is ErrorKind.CONFLICT
    assert V4_8.intent in str(caught.value)
    assert "fedcba" in str(caught.value)


async def test_a_plain_node(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    request = dataclasses.replace(V4_8, provisioning="on-demand")
    node = await cloud.create_node(ZONE, "n1", request, deadline_s=30)
    assert (node.state, node.spot, node.queued_resource) == (NodeState.READY, False, None)
    assert (await cloud.create_node(ZONE, "n1", request, deadline_s=30)).uid == node.uid
    emulator.set_delete_delay(0.5)
    await cloud.delete_node(ZONE, "n1")
    await cloud.delete_node(ZONE, "n1")
    assert (await cloud.get_node(ZONE, "n1")).state is NodeState.DELETING


async def test_a_node_that_is_not_made_in_time_is_no_success(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.set_delay(30)
    with pytest.raises(CloudError) as caught:
        await cloud.create_node(ZONE, "n1", V4_8, deadline_s=0.3)
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert caught.value.in_operation


async def metadata_of(emulator: Emulator, node: str) -> dict[str, str]:
    async with grpc.aio.insecure_channel(emulator.env["TPU_RELAY_API_ENDPOINT"]) as channel:
        raw = await api.TpuAsyncClient(transport=TpuGrpcAsyncIOTransport(channel=channel)).get_node(
            name=f"projects/{emulator.env['TPU_RELAY_PROJECT']}/locations/{ZONE}/nodes/{node}",
            metadata=[("authorization", f"Bearer {emulator.env['TPU_RELAY_API_KEY']}")],
        )
        return dict(raw.metadata)


async def test_metadata_that_is_not_named_stays(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await cloud.create_node(ZONE, "n1", V4_8, deadline_s=30)
    await cloud.update_metadata(ZONE, "n1", {"size": "big", "colour": "red"})
    await cloud.update_metadata(ZONE, "n1", {"colour": None})
    assert await metadata_of(emulator, "n1") == {"startup-script": "true", "size": "big"}


async def test_ssh_keys_are_added_to_those_of_others(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await cloud.create_node(ZONE, "n1", V4_8, deadline_s=30)
    await cloud.add_ssh_keys(ZONE, "n1", ["alice:ssh-ed25519 AAAA alice"])
    for _ in range(2):
        await cloud.add_ssh_keys(ZONE, "n1", ["relay:ssh-ed25519 BBBB relay"])
    keys = (await metadata_of(emulator, "n1"))["ssh-keys"]
    assert keys.splitlines() == ["alice:ssh-ed25519 AAAA alice", "relay:ssh-ed25519 BBBB relay"]


async def test_what_a_zone_offers(cloud: GoogleTpuCloud) -> None:
    assert {"v4-8", "v4-16"} <= set(await cloud.accelerator_types(ZONE))
    assert "tpu-ubuntu2204-base" in await cloud.runtime_versions(ZONE)


async def test_lists_are_read_to_their_end(emulator: Emulator) -> None:
    emulator.set_capacity(ZONE, "v4-8", 0)
    names = [f"s{index}" for index in range(7)]
    connection = Connection.from_environment(emulator.env)
    async with open_cloud(connection, policy=CallPolicy(page_size=3)) as cloud:
        for name in names:
            await cloud.create_queued_resource(ZONE, name, QueuedResourceRequest(V4_8))
        assert [found.name for found in await cloud.list_queued_resources(ZONE)] == names


@pytest.mark.parametrize(
    ("zone", "changes", "kind"),
    [
        ("us-central2-z", {}, ErrorKind.PERMISSION),
        (ZONE, {"accelerator_type": "v6e-1", "runtime_version": "v2-alpha-tpuv6e"}, ErrorKind.NOT_OFFERED),
        (ZONE, {"labels": {"Bad Label": "x"}}, ErrorKind.BAD_REQUEST),
    ],
)
async def test_what_the_api_refuses(
    cloud: GoogleTpuCloud, zone: str, changes: dict[str, object], kind: ErrorKind
) -> None:
    request = QueuedResourceRequest(dataclasses.replace(V4_8, **changes))  # type: ignore[arg-type]
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(zone, "s1", request)
    assert caught.value.kind is kind
    assert caught.value.permanent
    assert "'s1'" in str(caught.value)


async def test_a_wrong_key_is_refused_with_a_hint(emulator: Emulator) -> None:
    connection = dataclasses.replace(Connection.from_environment(emulator.env), api_key="wrong")
    async with open_cloud(connection) as cloud:
        with pytest.raises(CloudError, match="rights of the credentials") as caught:
            await cloud.list_nodes(ZONE)
    assert caught.value.kind is ErrorKind.PERMISSION


async def test_a_passing_fault_is_not_seen(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.fail_next("ListNodes", "UNAVAILABLE", "the service is unavailable", times=2)
    assert await cloud.list_nodes(ZONE) == []
    emulator.fail_next("CreateQueuedResource", "UNAVAILABLE", "the service is unavailable", times=2)
    await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    await active(cloud, "s1")
    emulator.fail_next("DeleteQueuedResource", "INTERNAL", "an internal error has occurred", times=1)
    await cloud.delete_queued_resource(ZONE, "s1")
    await gone(cloud, "s1")


async def test_a_creation_whose_answer_is_lost_is_made_once(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    emulator.fail_next("CreateQueuedResource", "UNAVAILABLE", "connection reset", times=1, after=True)
    made = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    assert made.name == "s1"
    assert [found.name for found in await cloud.list_queued_resources(ZONE)] == ["s1"]


async def test_a_creation_is_not_repeated_when_the_zone_is_full(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    text = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone'
    emulator.fail_next("CreateQueuedResource", "RESOURCE_EXHAUSTED", text, times=1)
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(V4_8))
    assert caught.value.kind is ErrorKind.STOCKOUT
    assert await cloud.list_queued_resources(ZONE) == []


async def test_a_cloud_that_does_not_answer_is_given_up_in_time() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    connection = Connection(project="p", bucket="gs://b", api_endpoint=f"127.0.0.1:{port}", api_key="k")
    begun = time.monotonic()
    async with silent, open_cloud(connection, policy=CallPolicy(try_s=0.3, total_s=1.0)) as cloud:
        with pytest.raises(CloudError) as caught:
            await cloud.get_node(ZONE, "n1")
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert 0.5 < time.monotonic() - begun < 5


async def test_a_cloud_that_is_silent_for_seconds_is_told_of_once_and_so_is_its_return(
    emulator: Emulator,
) -> None:
    connection, said = Connection.from_environment(emulator.env), []
    policy = CallPolicy(first_pause_s=0.05, longest_pause_s=0.05, tell_after_s=0.1)
    async with open_cloud(connection, policy=policy, report=said.append) as cloud:
        emulator.fail_next("ListNodes", "UNAVAILABLE", "down", times=1)
        assert await cloud.list_nodes(ZONE) == []
        assert said == []
        emulator.fail_next("ListNodes", "UNAVAILABLE", "down", times=12)
        assert await cloud.list_nodes(ZONE) == []
    waiting, back = said
    assert waiting.startswith("the Cloud TPU API does not answer; trying again")
    assert "down" in waiting
    assert back == "the Cloud TPU API answers again"


async def test_a_zone_without_queued_resources_has_none(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    message = "Queued resources are not supported in zone us-central2-b."
    for method in ("Get", "List", "Delete", "Create"):
        plural = "s" if method == "List" else ""
        emulator.fail_next(f"{method}QueuedResource{plural}", "UNIMPLEMENTED", message, times=2)
    with pytest.raises(CloudError) as caught:
        await cloud.get_queued_resource(ZONE, "q1")
    assert caught.value.kind is ErrorKind.NOT_FOUND
    assert await cloud.list_queued_resources(ZONE) == []
    await cloud.delete_queued_resource(ZONE, "q1")
    node = NodeRequest("v4-8", "tpu-ubuntu2204-base", "spot", "i")
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(ZONE, "q1", QueuedResourceRequest(node))
    assert caught.value.kind is ErrorKind.NO_QUEUE
