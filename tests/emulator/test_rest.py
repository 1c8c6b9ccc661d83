"""The REST form of the API, over HTTP as public clients speak it: the same cloud as over gRPC."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from tests.emulator.api import V4, ZONE, api_of, node_name, parent, queued_name
from tpu.emulator.emulator import Emulator

NODE = {"acceleratorType": V4["accelerator_type"], "runtimeVersion": V4["runtime_version"]}


class Rest:
    """Calls of one version, with the key unless told otherwise."""

    def __init__(self, emulator: Emulator, version: str = "v2") -> None:
        self._base = f"{emulator.env['TPU_RELAY_REST_ENDPOINT']}/{version}/"
        self._key = emulator.env["TPU_RELAY_API_KEY"]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answer(self, verb: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key if key is None else key}"}
        request = urllib.request.Request(self._base + path, data=data, method=verb, headers=headers)
        try:
            with self._opener.open(request, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def call(self, verb: str, path: str, body: Any = None) -> Any:
        status, answer = self.answer(verb, path, body)
        assert status == 200, answer
        return answer

    def refusal(self, verb: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, str, str]:
        status, answer = self.answer(verb, path, body, key)
        error = answer["error"]
        assert error["code"] == status
        return status, error["status"], error["message"]

    def finish(self, operation: Mapping[str, Any]) -> Any:
        """Wait for an operation and return its response."""
        deadline = time.monotonic() + 30
        while not operation.get("done"):
            assert time.monotonic() < deadline, operation
            time.sleep(0.02)
            operation = self.call("GET", operation["name"])
        assert "error" not in operation, operation
        return operation["response"]


@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_a_node_from_creation_to_deletion(emulator: Emulator, version: str) -> None:
    rest = Rest(emulator, version)
    wanted = {**NODE, "schedulingConfig": {"spot": True}, "labels": {"a": "b"}}
    operation = rest.call("POST", f"{parent()}/nodes?nodeId=n1&alt=json", wanted)
    assert (
        operation["metadata"]["@type"] == f"type.googleapis.com/google.cloud.tpu.{version}.OperationMetadata"
    )
    assert (operation["metadata"]["target"], operation["metadata"]["verb"]) == (node_name("n1"), "create")
    assert "done" not in operation or operation["done"]
    made = rest.finish(operation)
    assert made["@type"] == f"type.googleapis.com/google.cloud.tpu.{version}.Node"

    node = rest.call("GET", node_name("n1"))
    assert (node["state"], node["health"], node["labels"]) == ("READY", "HEALTHY", {"a": "b"})
    assert node["schedulingConfig"] == {"spot": True}
    assert node["id"].isdigit()
    assert node["networkEndpoints"][0]["ipAddress"].startswith("127.")
    assert made == {**node, "@type": made["@type"]}

    change = {"metadata": {"ssh-keys": "me:ssh-ed25519 AAAA"}, "labels": {"not": "named"}}
    rest.finish(rest.call("PATCH", f"{node_name('n1')}?updateMask=metadata", change))
    changed = rest.call("GET", node_name("n1"))
    assert (changed["metadata"], changed["labels"]) == (change["metadata"], {"a": "b"})

    body = {"queryPath": "hostkeys/"}
    [worker] = rest.call("POST", f"{node_name('n1')}:getGuestAttributes", body)["guestAttributes"]
    found = {item["key"]: item["value"] for item in worker["queryValue"]["items"]}
    assert found["ssh-ed25519"].startswith("AAAA")

    deletion = rest.call("DELETE", node_name("n1"))
    assert rest.finish(deletion) == {"@type": "type.googleapis.com/google.protobuf.Empty"}
    assert rest.refusal("GET", node_name("n1"))[:2] == (404, "NOT_FOUND")


async def test_what_one_form_makes_the_other_shows(emulator: Emulator) -> None:
    rest = Rest(emulator, "v2alpha1")
    body = {"tpu": {"nodeSpec": [{"nodeId": "q1", "node": NODE}]}, "spot": {}}
    rest.call("POST", f"{parent()}/queuedResources?queuedResourceId=q1", body)
    async with api_of(emulator) as api:
        await api.wait_queued("q1", "ACTIVE")
        shown = rest.call("GET", queued_name("q1"))
        assert (shown["state"]["state"], shown["spot"]) == ("ACTIVE", {})
        await api.create_queued("q2")
        listed = rest.call("GET", f"{parent()}/queuedResources")["queuedResources"]
        assert [found["name"] for found in listed] == [queued_name("q1"), queued_name("q2")]
        deleted = rest.finish(rest.call("DELETE", f"{queued_name('q1')}?force=true"))
        assert deleted["@type"] == "type.googleapis.com/google.cloud.tpu.v2alpha1.QueuedResource"
        assert rest.refusal("GET", queued_name("q1"))[1] == "NOT_FOUND"


def test_lists_come_in_pages(emulator: Emulator) -> None:
    rest = Rest(emulator)
    for name in ("a", "b", "c"):
        rest.call("POST", f"{parent()}/nodes?nodeId={name}", NODE)
    first = rest.call("GET", f"{parent()}/nodes?pageSize=2")
    rest_of_it = rest.call("GET", f"{parent()}/nodes?pageSize=2&pageToken={first['nextPageToken']}")
    assert "nextPageToken" not in rest_of_it
    names = [node["name"] for page in (first, rest_of_it) for node in page["nodes"]]
    assert names == [node_name(name) for name in ("a", "b", "c")]
    named = rest.call("GET", f"{parent()}/nodes?fields=nodes(name)")
    assert named == {"nodes": [{"name": name} for name in names]}
    everywhere = parent("-")
    assert len(rest.call("GET", f"{everywhere}/nodes")["nodes"]) == 3
    assert rest.refusal("GET", f"{parent()}/nodes?pageToken=nonsense")[1] == "INVALID_ARGUMENT"
    first = rest.call("GET", f"{parent()}/operations?pageSize=2")
    assert len(first["operations"]) == 2
    second = rest.call("GET", f"{parent()}/operations?pageSize=2&pageToken={first['nextPageToken']}")
    assert len(second["operations"]) == 1
    assert {operation["metadata"]["verb"] for operation in first["operations"]} == {"create"}


@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_what_a_zone_offers(emulator: Emulator, version: str) -> None:
    rest = Rest(emulator, version)
    zones = [
        found["locationId"] for found in rest.call("GET", "projects/relay-emulated/locations")["locations"]
    ]
    assert ZONE in zones
    types = rest.call("GET", f"{parent()}/acceleratorTypes")["acceleratorTypes"]
    assert {"name": f"{parent()}/acceleratorTypes/v4-8", "type": "v4-8",
            "acceleratorConfigs": [{"type": "V4", "topology": "2x2x1"}]} in types  # fmt: skip
    [image] = rest.call("GET", f"{parent()}/runtimeVersions")["runtimeVersions"]
    assert image["version"] == "tpu-ubuntu2204-base"
    pages = rest.call("GET", "projects/relay-emulated/locations?pageSize=2")
    assert [found["locationId"] for found in pages["locations"]] == zones[:2]


def test_refusals_are_those_of_the_api(emulator: Emulator) -> None:
    rest = Rest(emulator)
    nodes = f"{parent()}/nodes"
    assert rest.refusal("GET", nodes, key="wrong")[:2] == (401, "UNAUTHENTICATED")
    assert rest.refusal("GET", nodes, key="")[:2] == (401, "UNAUTHENTICATED")
    assert rest.refusal("GET", f"{parent('mars')}/nodes")[:2] == (403, "PERMISSION_DENIED")
    assert rest.refusal("PUT", nodes)[:2] == (404, "NOT_FOUND")
    assert rest.refusal("POST", f"{nodes}?nodeId=n", b"{")[:2] == (400, "INVALID_ARGUMENT")
    assert rest.refusal("POST", f"{nodes}?nodeId=n", [1])[:2] == (400, "INVALID_ARGUMENT")
    huge = {**NODE, "metadata": {"a": "b" * 5_000_000}}
    assert rest.refusal("POST", f"{nodes}?nodeId=n", huge)[:2] == (400, "INVALID_ARGUMENT")
    rest.call("POST", f"{nodes}?nodeId=n", NODE)
    assert rest.refusal("POST", f"{nodes}?nodeId=n", NODE)[:2] == (409, "ALREADY_EXISTS")
    emulator.set_quota(ZONE, "v4-8", 0)
    status, name, message = rest.refusal("POST", f"{nodes}?nodeId=m", NODE)
    assert (status, name) == (429, "RESOURCE_EXHAUSTED")
    assert "Limit: 0 in region us-central2" in message
    emulator.set_quota(ZONE, "v4-8", None)
    emulator.stockout(ZONE, "v4-8")
    failed = rest.call("POST", f"{nodes}?nodeId=m", NODE)
    assert failed["done"]
    assert failed["error"]["code"] == 8
    assert "no more capacity" in failed["error"]["message"]


def test_faults_on_demand_meet_rest_calls_too(emulator: Emulator) -> None:
    emulator.fail_next("ListNodes", "UNAVAILABLE", "away")
    rest = Rest(emulator)
    assert rest.refusal("GET", f"{parent()}/nodes") == (503, "UNAVAILABLE", "away")
    assert rest.call("GET", f"{parent()}/nodes") == {}
