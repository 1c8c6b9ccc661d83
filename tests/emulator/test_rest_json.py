"""From REST calls to methods and messages, and back: verbs, paths, parameters, field names, versions, errors."""

from __future__ import annotations

from typing import Any

import pytest
from google.longrunning import operations_pb2

from tpu.emulator import errors, messages, rest_fields, rest_json, rest_routes, tpu_service
from tpu.emulator.errors import ApiError

ZONE = "projects/p/locations/us-central2-b"


def read(verb: str, path: str, query: list[tuple[str, str]] = [], body: Any = None) -> Any:  # noqa: B006
    match = rest_routes.find(verb, path)
    assert match is not None
    return rest_json.read_request(match, query, body or {}, messages.request(match.route.method))


def refused(verb: str, path: str, query: list[tuple[str, str]] = [], body: Any = None) -> str:  # noqa: B006
    with pytest.raises(ApiError) as caught:
        read(verb, path, query, body)
    assert caught.value.code == 3
    return caught.value.message


@pytest.mark.parametrize(
    ("verb", "path", "method"),
    [
        ("GET", f"{ZONE}/nodes", "ListNodes"),
        ("POST", f"{ZONE}/nodes", "CreateNode"),
        ("GET", f"{ZONE}/nodes/n", "GetNode"),
        ("PATCH", f"{ZONE}/nodes/n", "UpdateNode"),
        ("DELETE", f"{ZONE}/nodes/n", "DeleteNode"),
        ("POST", f"{ZONE}/nodes/n:stop", "StopNode"),
        ("POST", f"{ZONE}/nodes/n:start", "StartNode"),
        ("POST", f"{ZONE}/nodes/n:getGuestAttributes", "GetGuestAttributes"),
        ("POST", f"{ZONE}/queuedResources/q:reset", "ResetQueuedResource"),
        ("DELETE", f"{ZONE}/queuedResources/q", "DeleteQueuedResource"),
        ("POST", f"{ZONE}:generateServiceIdentity", "GenerateServiceIdentity"),
        ("GET", f"{ZONE}/operations/o", "GetOperation"),
        ("GET", "projects/p/locations", "ListLocations"),
        ("GET", ZONE, "GetLocation"),
    ],
)
@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_paths(version: str, verb: str, path: str, method: str) -> None:
    match = rest_routes.find(verb, f"/{version}/{path}")
    assert match is not None
    assert (match.version, match.route.method) == (version, method)


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("POST", f"/v2/{ZONE}/nodes/n:simulateMaintenanceEvent"),  # of v2alpha1 only
        ("PUT", f"/v2/{ZONE}/nodes/n"),
        ("GET", f"/v2/{ZONE}/nodes/n/more"),
        ("POST", f"/v2/{ZONE}/nodes/n:explode"),
        ("GET", f"/v3/{ZONE}/nodes"),
        ("GET", f"/v1/{ZONE}/nodes"),
        ("GET", f"/{ZONE}/nodes"),
    ],
)
def test_what_is_no_method(verb: str, path: str) -> None:
    assert rest_routes.find(verb, path) is None


def test_every_method_of_the_service_has_a_path() -> None:
    assert {route.method for route in rest_routes.routes("v2alpha1")} >= set(tpu_service.METHODS)


@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_a_creation(version: str) -> None:
    wanted = {"acceleratorType": "v4-8", "schedulingConfig": {"spot": True}, "metadata": {"a_b": "C"}}
    request = read("POST", f"/{version}/{ZONE}/nodes", [("nodeId", "n"), ("alt", "json")], wanted)
    assert isinstance(request, messages.request("CreateNode"))
    assert (request.parent, request.node_id, request.node.accelerator_type) == (ZONE, "n", "v4-8")
    assert request.node.scheduling_config.spot
    assert dict(request.node.metadata) == {"a_b": "C"}


def test_parameters_are_read_by_their_types() -> None:
    assert read("GET", f"/v2/{ZONE}/nodes", [("pageSize", "7"), ("pageToken", "t")]).page_size == 7
    assert read("DELETE", f"/v2/{ZONE}/queuedResources/q", [("force", "True")]).force
    assert not read("DELETE", f"/v2/{ZONE}/queuedResources/q", [("force", "false")]).force
    body = {"queryPath": "hostkeys/", "workerIds": ["0", "2"]}
    assert list(read("POST", f"/v2/{ZONE}/nodes/n:getGuestAttributes", [], body).worker_ids) == ["0", "2"]


@pytest.mark.parametrize("mask", ["dataDisks,metadata", "data_disks, metadata"])
def test_field_masks(mask: str) -> None:
    body = {"name": "something else", "metadata": {"a": "b"}}
    request = read("PATCH", f"/v2alpha1/{ZONE}/nodes/n", [("updateMask", mask)], body)
    assert list(request.update_mask.paths) == ["data_disks", "metadata"]
    assert request.node.name == f"{ZONE}/nodes/n"


@pytest.mark.parametrize(
    ("verb", "path", "query", "body", "text"),
    [
        ("POST", "nodes", [], {"acceleratorTyp": "v4-8"}, "Unknown name \"acceleratorTyp\" at 'node'"),
        ("POST", "nodes", [], {"networkConfig": {"x": 1}}, "Unknown name \"x\" at 'node.network_config'"),
        ("POST", "nodes", [], {"acceleratorType": 5}, "accelerator_?[tT]ype"),
        ("POST", "nodes", [("node_idd", "n")], {}, 'Unknown name "node_idd": Cannot bind'),
        ("POST", "nodes", [("node", "n")], {}, "Cannot bind"),
        ("GET", "nodes", [("pageSize", "many")], {}, "page_?[sS]ize"),
        ("DELETE", "queuedResources/q", [("force", "yes")], {}, "TYPE_BOOL"),
        ("GET", "nodes", [], {"a": 1}, "takes no body"),
        # What v2 lacks is no field there, though v2alpha1 has it.
        ("DELETE", "nodes/n", [("requestId", "r")], {}, "Cannot bind"),
        ("POST", "queuedResources", [], {"provisioningModel": "FLEX_START"}, "provisioningModel"),
        ("POST", "queuedResources", [], {"bestEffort": {}}, "bestEffort"),
    ],
)
def test_what_is_refused(verb: str, path: str, query: Any, body: Any, text: str) -> None:
    import re

    assert re.search(text, refused(verb, f"/v2/{ZONE}/{path}", query, body))


def test_v2_and_v2alpha1_spell_several_nodes_differently() -> None:
    params = {"nodeCount": 2, "nodeIdPrefix": "s"}
    body = {"tpu": {"nodeSpec": [{"multisliceParams": params, "node": {"acceleratorType": "v4-8"}}]}}
    request = read("POST", f"/v2/{ZONE}/queuedResources", [("queuedResourceId", "q")], body)
    assert request.queued_resource.tpu.node_spec[0].multi_node_params.node_count == 2
    assert rest_json.write_response("v2", request.queued_resource) == body
    shown = rest_json.write_response("v2alpha1", request.queued_resource)
    assert shown["tpu"]["nodeSpec"][0]["multiNodeParams"] == params


def test_what_the_client_library_lacks_is_there_in_v2alpha1() -> None:
    body = {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "14400s"}}
    request = read("POST", f"/v2alpha1/{ZONE}/queuedResources", [], body)
    assert request.queued_resource.run_duration.max_run_duration.seconds == 14400
    assert rest_json.write_response("v2alpha1", request.queued_resource) == body
    assert rest_json.write_response("v2", request.queued_resource) == {}


def operation(verb: str, response: Any) -> Any:
    made = operations_pb2.Operation(name=f"{ZONE}/operations/o", done=True)
    made.metadata.Pack(messages.OperationMetadata(verb=verb, target="t", api_version="v2alpha1"))
    made.response.Pack(response)
    return made


def test_operations_have_the_types_of_their_version() -> None:
    node = messages.Node(name="n", state=2, id=2**60, autocheckpoint_enabled=True)
    alpha = rest_json.write_response("v2alpha1", operation("create", node))
    assert alpha["metadata"]["@type"] == "type.googleapis.com/google.cloud.tpu.v2alpha1.OperationMetadata"
    assert alpha["response"] == {
        "@type": "type.googleapis.com/google.cloud.tpu.v2alpha1.Node",
        "name": "n", "state": "READY", "id": str(2**60), "autocheckpointEnabled": True,
    }  # fmt: skip
    v2 = rest_json.write_response("v2", operation("create", node))
    assert v2["metadata"] == {
        "@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata",
        "verb": "create", "target": "t", "apiVersion": "v2",
    }  # fmt: skip
    assert v2["response"] == {
        "@type": "type.googleapis.com/google.cloud.tpu.v2.Node", "name": "n", "state": "READY", "id": str(2**60),
    }  # fmt: skip
    deleted = rest_json.write_response("v2", operation("delete", messages.QueuedResource(name="q")))
    assert deleted["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [(3, 400, "INVALID_ARGUMENT"), (5, 404, "NOT_FOUND"), (6, 409, "ALREADY_EXISTS"), (7, 403, "PERMISSION_DENIED"),
     (8, 429, "RESOURCE_EXHAUSTED"), (9, 400, "FAILED_PRECONDITION"), (13, 500, "INTERNAL"),
     (14, 503, "UNAVAILABLE"), (16, 401, "UNAUTHENTICATED")],
)  # fmt: skip
def test_errors(code: int, status: int, name: str) -> None:
    assert rest_json.write_error(ApiError(code, "text")) == (
        status,
        {"error": {"code": status, "message": "text", "status": name}},
    )


def test_details_of_errors() -> None:
    _, body = rest_json.write_error(errors.too_many_creations(91))
    [detail] = body["error"]["details"]
    assert detail["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
    assert detail["reason"] == "RATE_LIMIT_EXCEEDED"


NODES = {
    "nodes": [{"name": "n", "networkConfig": {"network": "d", "x": 1}, "labels": {"a-b": "c"}}],
    "nextPageToken": "t",
}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ("nextPageToken", {"nextPageToken": "t"}),
        ("nodes(name,labels)", {"nodes": [{"name": "n", "labels": {"a-b": "c"}}]}),
        (
            "nodes/networkConfig/network,nodes/name",
            {"nodes": [{"name": "n", "networkConfig": {"network": "d"}}]},
        ),
        (
            "nodes.network_config.x, next_page_token",
            {"nodes": [{"networkConfig": {"x": 1}}], "nextPageToken": "t"},
        ),
        ("nodes(networkConfig(x),name)", {"nodes": [{"name": "n", "networkConfig": {"x": 1}}]}),
        ("*/name,nodes/nothing", {"nodes": [{}], "nextPageToken": "t"}),
        ("nodes/*/network", {"nodes": [{"name": "n", "networkConfig": {"network": "d"}, "labels": {}}]}),
    ],
)
def test_partial_answers(fields: str, kept: object) -> None:
    assert rest_fields.select(rest_fields.parse(fields), NODES) == kept


@pytest.mark.parametrize(
    "fields", ["nodes(name", "nodes)", ",", "nodes(,name)", "nodes/", "(name)", "a(b)c", " "]
)
def test_fields_that_cannot_be_read(fields: str) -> None:
    with pytest.raises(ApiError, match="Invalid field selection"):
        rest_fields.parse(fields)
