"""Nodes through a real client: made, looked at, changed, stopped, deleted, and what is refused."""

from __future__ import annotations

import uuid

import asyncssh
import grpc
import pytest
from google.api_core.exceptions import GoogleAPICallError
from google.cloud import tpu_v2alpha1 as tpu
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport
from google.protobuf import empty_pb2

from tests.emulator.api import V4, ZONE, Api, api_of, node_name, parent, poll, refusal
from tpu.emulator.emulator import Emulator


@pytest.fixture
async def api(emulator: Emulator):
    async with api_of(emulator) as opened:
        yield opened


async def test_a_node_is_made_with_a_real_host_and_deleted(api: Api, emulator: Emulator):
    node = await api.finish(await api.create_node("n", labels={"pool": "a"}, description="mine"))
    assert isinstance(node, tpu.Node)
    assert (node.state.name, node.health.name) == ("READY", "HEALTHY")
    assert (node.accelerator_type, node.accelerator_config.topology) == ("v4-8", "2x2x1")
    assert dict(node.labels) == {"pool": "a"}
    endpoint = node.network_endpoints[0]
    assert endpoint.ip_address.startswith("127.")
    assert endpoint.access_config.external_ip == endpoint.ip_address
    assert emulator.processes()
    assert node == await api.call("get_node", name=node_name("n"))

    gone = await api.delete_node("n")
    assert isinstance(gone, empty_pb2.Empty)
    assert emulator.processes() == []
    assert (await refusal(api.call("get_node", name=node_name("n")))) == (
        "NOT_FOUND",
        f"Resource '{node_name('n')}' was not found",
    )


async def test_every_host_has_its_own_address_and_core(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n", accelerator_type="v4-16"))
    (node,) = emulator.nodes()
    hosts = node["hosts"]
    assert [host["index"] for host in hosts] == [0, 1]
    assert hosts[0]["address"] != hosts[1]["address"]
    assert all(len(host["cpus"]) == 1 for host in hosts)
    found = await api.call("get_node", name=node_name("n"))
    assert [endpoint.ip_address for endpoint in found.network_endpoints] == [h["address"] for h in hosts]


async def test_no_external_address_when_none_is_wanted(api: Api):
    await api.finish(await api.create_node("n", network_config={"enable_external_ips": False}))
    node = await api.call("get_node", name=node_name("n"))
    assert node.network_endpoints[0].ip_address
    assert not node.network_endpoints[0].access_config.external_ip
    await api.finish(await api.create_node("m", network_config={"enable_external_ips": True}))
    node = await api.call("get_node", name=node_name("m"))
    assert node.network_endpoints[0].access_config.external_ip


async def test_keys_set_by_an_update_open_the_host_whose_key_is_published(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n"))
    key = asyncssh.generate_private_key("ssh-ed25519")
    public = key.export_public_key().decode().strip()
    node = tpu.Node(name=node_name("n"), metadata={"ssh-keys": f"relay:{public}"})
    updated = await api.finish(await api.call("update_node", node=node, update_mask={"paths": ["metadata"]}))
    assert isinstance(updated, tpu.Node)
    answer = await api.call("get_guest_attributes", name=node_name("n"), query_path="hostkeys/")
    published = {item.key: item.value for item in answer.guest_attributes[0].query_value.items}
    address = updated.network_endpoints[0].ip_address
    port = int(emulator.env["TPU_RELAY_SSH_PORT"])
    known = asyncssh.import_known_hosts(f"[{address}]:{port} ssh-ed25519 {published['ssh-ed25519']}\n")
    async with asyncssh.connect(
        address, port, username="relay", client_keys=[key], known_hosts=known, config=None
    ) as connection:
        result = await connection.run("echo $TPU_EMULATOR_HOST $STORAGE_EMULATOR_HOST", check=True)
    assert result.stdout == f"n-0 {emulator.env['STORAGE_EMULATOR_HOST']}\n"


async def test_guest_attributes_of_some_workers(api: Api):
    await api.finish(await api.create_node("n", accelerator_type="v4-16"))

    async def ask(**request):
        found = await api.call("get_guest_attributes", name=node_name("n"), **request)
        return [
            {(item.namespace, item.key): item.value for item in one.query_value.items}
            for one in found.guest_attributes
        ]

    both = await ask()
    assert len(both) == 2
    assert both[0]["hostkeys", "ssh-ed25519"] != both[1]["hostkeys", "ssh-ed25519"]
    assert await ask(worker_ids=["1"]) == [both[1]]
    assert await ask(query_path="hostkeys/hostname", worker_ids=["0"]) == [
        {("hostkeys", "hostname"): "n-w-0"}
    ]
    code, text = await refusal(api.call("get_guest_attributes", name=node_name("n"), worker_ids=["2"]))
    assert (code, "workers 0 to 1" in text) == ("INVALID_ARGUMENT", True)


async def test_labels_are_replaced_and_other_fields_kept(api: Api):
    await api.finish(await api.create_node("n", labels={"a": "1", "b": "2"}, metadata={"x": "y"}))
    node = tpu.Node(name=node_name("n"), labels={"c": "3"}, metadata={"lost": "?"})
    await api.call("update_node", node=node, update_mask={"paths": ["labels"]})
    found = await api.call("get_node", name=node_name("n"))
    assert dict(found.labels) == {"c": "3"}
    assert dict(found.metadata) == {"x": "y"}


@pytest.mark.parametrize(
    ("paths", "fields", "text"),
    [
        ([], {}, "update_mask must name"),
        (["accelerator_type"], {"accelerator_type": "v4-16"}, "cannot be updated"),
        (["labels"], {"labels": {"Bad": "x"}}, "Invalid label"),
    ],
)
async def test_bad_updates_are_refused(api: Api, paths, fields, text):
    await api.finish(await api.create_node("n"))
    node = tpu.Node(name=node_name("n"), **fields)
    code, message = await refusal(api.call("update_node", node=node, update_mask={"paths": paths}))
    assert code == "INVALID_ARGUMENT"
    assert text in message


@pytest.mark.parametrize(
    ("zone", "node_id", "fields", "code", "text"),
    [
        (ZONE, "n", {"accelerator_type": "v6e-1"}, "INVALID_ARGUMENT",
         'accelerator configuration for accelerator type, "v6e-1", could not be found'),
        (ZONE, "Bad", {}, "INVALID_ARGUMENT", "Invalid node_id 'Bad'"),
        (ZONE, "n", {"runtime_version": "none"}, "INVALID_ARGUMENT", "runtime version 'none'"),
        ("mars-north1-a", "n", {}, "PERMISSION_DENIED",
         "Permission denied on 'locations/mars-north1-a' (or it may not exist)"),
    ],
)  # fmt: skip
async def test_bad_creations_are_refused_and_make_nothing(
    api: Api, emulator: Emulator, zone, node_id, fields, code, text
):
    seen = await refusal(api.create_node(node_id, zone, **fields))
    assert seen[0] == code
    assert text in seen[1]
    assert emulator.nodes() == []


async def test_another_project_is_refused(api: Api):
    code, text = await refusal(api.call("list_nodes", parent="projects/other/locations/us-central2-b"))
    assert code == "PERMISSION_DENIED"
    assert "project other" in text


async def test_a_taken_name_is_refused_until_it_is_deleted(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n", scheduling_config={"spot": True}))
    taken = ("ALREADY_EXISTS", f"Resource '{node_name('n')}' already exists")
    assert await refusal(api.create_node("n")) == taken
    emulator.preempt("n")
    assert await refusal(api.create_node("n")) == taken
    await api.delete_node("n")
    await api.finish(await api.create_node("n"))


async def test_the_same_request_id_makes_one_node(api: Api, emulator: Emulator):
    request = {
        "parent": parent(),
        "node_id": "n",
        "node": tpu.Node(V4),
        "request_id": str(uuid.uuid4()),
    }
    first = await api.call("create_node", **request)
    second = await api.call("create_node", **request)
    assert first.operation.name == second.operation.name
    await api.finish(first)
    deletion = {"name": node_name("n"), "request_id": str(uuid.uuid4())}
    first = await api.call("delete_node", **deletion)
    await api.finish(first)
    second = await api.call("delete_node", **deletion)
    assert first.operation.name == second.operation.name
    assert emulator.nodes() == []


async def test_lists_come_in_pages_in_order_and_from_all_zones(api: Api):
    for node_id in ("c", "a", "b"):
        await api.create_node(node_id)
    await api.create_node("z", "us-east5-b", accelerator_type="v6e-1", runtime_version="v2-alpha-tpuv6e")
    page = await api.call("list_nodes", parent=parent(), page_size=2)
    assert [node.name for node in page.nodes] == [node_name("a"), node_name("b")]
    page = await api.call("list_nodes", parent=parent(), page_size=2, page_token=page.next_page_token)
    assert [node.name for node in page.nodes] == [node_name("c")]
    assert not page.next_page_token
    everywhere = await api.call("list_nodes", parent=parent("-"))
    assert len(everywhere.nodes) == 4


async def test_an_on_demand_node_is_stopped_and_started_again(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n"))
    stopped = await api.finish(await api.call("stop_node", name=node_name("n")))
    assert stopped.state.name == "STOPPED"
    assert emulator.processes() == []
    _, text = await refusal(api.call("stop_node", name=node_name("n")))
    assert "stop is not supported while in state STOPPED" in text
    started = await api.finish(await api.call("start_node", name=node_name("n")))
    assert started.state.name == "READY"
    assert emulator.processes()


@pytest.mark.parametrize("fields", [{"scheduling_config": {"spot": True}}, {"accelerator_type": "v4-16"}])
async def test_spot_nodes_and_pods_cannot_be_stopped(api: Api, fields):
    await api.finish(await api.create_node("n", **fields))
    code, text = await refusal(api.call("stop_node", name=node_name("n")))
    assert (code, "stop is not supported for" in text) == ("INVALID_ARGUMENT", True)


async def test_a_node_preempted_while_being_made_fails_its_operation(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    operation = await api.create_node("n", scheduling_config={"spot": True})
    assert await api.node_state("n") == "CREATING"
    emulator.preempt("n")
    with pytest.raises(GoogleAPICallError, match="update is not supported while in state PREEMPTED"):
        await api.finish(operation)
    assert await api.node_state("n") == "PREEMPTED"


async def test_a_node_deleted_while_being_made_is_gone(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    creation = await api.create_node("n")
    await api.delete_node("n")
    assert (await api.operation(creation.operation.name)).error.code == 1
    assert emulator.nodes() == []


async def test_a_node_shows_deleting_for_the_delay_and_is_deleted_once(api: Api, emulator: Emulator):
    await api.finish(await api.create_node("n"))
    emulator.set_delete_delay(60)
    await api.call("delete_node", name=node_name("n"))
    assert await api.node_state("n") == "DELETING"
    await poll(lambda: _no_processes(emulator), True)
    code, _ = await refusal(api.call("delete_node", name=node_name("n")))
    assert code == "FAILED_PRECONDITION"


async def _no_processes(emulator: Emulator) -> bool:
    return emulator.processes() == []


async def test_operations_are_looked_up_listed_and_deleted(api: Api, emulator: Emulator):
    emulator.set_delay(60)
    name = (await api.create_node("n")).operation.name
    running = await api.operation(name)
    assert not running.done
    metadata = tpu.OperationMetadata.deserialize(running.metadata.value)
    assert (metadata.verb, metadata.target) == ("create", node_name("n"))
    listed = await api.client.list_operations({"name": parent()}, timeout=20, metadata=api.metadata)
    assert [operation.name for operation in listed.operations] == [name]
    await api.client.cancel_operation({"name": name}, timeout=20, metadata=api.metadata)
    emulator.reset()
    code, _ = await refusal(api.operation(name))
    assert code == "NOT_FOUND"


async def test_what_a_zone_offers(api: Api):
    types = await api.call("list_accelerator_types", parent=parent(), page_size=500)
    assert {"v4-8", "v4-16", "v4-4096"} <= {kind.type_ for kind in types.accelerator_types}
    assert all(kind.type_.startswith("v4-") for kind in types.accelerator_types)
    one = await api.call("get_accelerator_type", name=f"{parent()}/acceleratorTypes/v4-16")
    assert one.accelerator_configs[0].topology == "2x2x2"
    versions = await api.call("list_runtime_versions", parent=parent("us-east5-b"))
    assert [one.version for one in versions.runtime_versions] == ["v2-alpha-tpuv5", "v2-alpha-tpuv6e"]
    code, _ = await refusal(api.call("get_runtime_version", name=f"{parent()}/runtimeVersions/none"))
    assert code == "NOT_FOUND"
    locations = await api.client.list_locations(
        {"name": "projects/relay-emulated"}, timeout=20, metadata=api.metadata
    )
    assert "us-central2-b" in [location.location_id for location in locations.locations]


async def test_the_key_is_needed(api: Api):
    for metadata in ([], [("authorization", "Bearer wrong")], [("authorization", api.metadata[0][1][:-1])]):
        api.metadata = metadata
        code, text = await refusal(_without_interceptor(api))
        assert code == "UNAUTHENTICATED"
        assert "Bearer" in text


async def _without_interceptor(api: Api):
    transport = TpuGrpcAsyncIOTransport(channel=grpc.aio.insecure_channel(api.endpoint))
    client = tpu.TpuAsyncClient(transport=transport)
    try:
        return await client.list_nodes({"parent": parent()}, timeout=20, metadata=api.metadata)
    finally:
        await transport.close()


async def test_simulated_maintenance_is_announced_on_the_node(api: Api):
    await api.finish(await api.create_node("n"))
    node = await api.finish(
        await api.call("simulate_maintenance_event", name=node_name("n"), worker_ids=["0"])
    )
    assert node.upcoming_maintenance.maintenance_status.name == "ONGOING"
    code, _ = await refusal(api.call("simulate_maintenance_event", name=node_name("n"), worker_ids=["one"]))
    assert code == "INVALID_ARGUMENT"


async def test_a_project_has_a_service_identity(api: Api):
    answer = await api.call("generate_service_identity", parent=parent())
    assert "relay-emulated" in answer.identity.email


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("get_node", "n"),
        ("get_node", parent()),
        ("get_node", f"{parent()}/queuedResources/n"),
        ("delete_queued_resource", node_name("n")),
        ("get_runtime_version", node_name("n")),
    ],
)
async def test_malformed_names_are_refused(api: Api, method: str, name: str):
    code, text = await refusal(api.call(method, name=name))
    assert code == "INVALID_ARGUMENT"
    assert "Malformed name" in text
