"""Flex-start, which goes over the REST form of the API: made, known by its intent, refused as any other."""

from __future__ import annotations

import dataclasses

import pytest
from google.api_core import exceptions as api_exceptions

from tests.cloud.test_google import V4_8, ZONE, active
from tpu.cloud import CloudError, ErrorKind, QueuedResourceRequest
from tpu.cloud.calls import CallPolicy, cloud_error
from tpu.cloud.google import GoogleTpuCloud, open_cloud
from tpu.cloud.rest import call_error
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator

FLEX = dataclasses.replace(V4_8, provisioning="flex-start", max_run_s=3600.0)


async def test_a_flex_start_slice(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    made = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))
    assert (made.name, made.spot) == ("s1", False)
    assert made.labels == {"relay-pool": "test", "relay-intent": FLEX.intent}
    await active(cloud, "s1")
    assert [node["provisioning"] for node in emulator.nodes()] == ["flex-start"]
    assert not (await cloud.get_node(ZONE, "s1")).spot
    again = await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))
    assert again.created == made.created
    other = QueuedResourceRequest(dataclasses.replace(FLEX, intent="fedcba"))
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(ZONE, "s1", other)
    assert caught.value.kind is ErrorKind.CONFLICT


async def test_a_refusal_is_the_same_as_over_grpc(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    emulator.set_quota(ZONE, "v4-8", 0)
    with pytest.raises(CloudError) as caught:
        await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))
    assert (caught.value.kind, caught.value.code) == (ErrorKind.NO_QUOTA, 8)
    assert caught.value.quota == "TPUV4sPreemptiblePerProjectPerRegionForTPUAPI"
    emulator.set_quota(ZONE, "v4-8", None)
    emulator.fail_next("CreateQueuedResource", "UNAVAILABLE", "away", times=2)
    await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))


async def test_plain_nodes_are_never_flex_start(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    with pytest.raises(CloudError, match="by queued resources only"):
        await cloud.create_node(ZONE, "n1", FLEX, deadline_s=30)
    assert emulator.nodes() == []


async def test_no_address_and_nobody_there(emulator: Emulator) -> None:
    connection = Connection.from_environment(emulator.env)
    async with open_cloud(dataclasses.replace(connection, rest_endpoint=None)) as cloud:
        with pytest.raises(CloudError, match="TPU_RELAY_REST_ENDPOINT"):
            await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))
    nobody = dataclasses.replace(connection, rest_endpoint="http://127.0.0.1:9")
    async with open_cloud(nobody, policy=CallPolicy(try_s=0.3, total_s=0.5)) as cloud:
        with pytest.raises(CloudError) as caught:
            await cloud.create_queued_resource(ZONE, "s1", QueuedResourceRequest(FLEX))
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert emulator.queued_resources() == []


INFO = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RATE_LIMIT_EXCEEDED", "domain": "d"}


@pytest.mark.parametrize(
    ("status", "content", "kind", "code"),
    [
        (400, {"error": {"status": "FAILED_PRECONDITION", "message": "while in state X"}}, ErrorKind.WRONG_STATE, 9),
        (400, {"error": {"status": "INVALID_ARGUMENT", "message": "bad"}}, ErrorKind.BAD_REQUEST, 3),
        (409, {"error": {"status": "ALREADY_EXISTS", "message": "x"}}, ErrorKind.ALREADY_EXISTS, 6),
        (409, {"error": {"status": "ABORTED", "message": "x"}}, ErrorKind.UNAVAILABLE, 10),
        (429, {"error": {"status": "RESOURCE_EXHAUSTED", "message": "x", "details": [INFO]}},
         ErrorKind.RATE_LIMITED, 8),
        (429, {"error": {"status": "RESOURCE_EXHAUSTED", "message": "x", "details": [{"@type": "no/such"}]}},
         ErrorKind.STOCKOUT, 8),
        (502, None, ErrorKind.UNAVAILABLE, 502),
        (503, None, ErrorKind.UNAVAILABLE, 14),
        (503, {"error": "text"}, ErrorKind.UNAVAILABLE, 14),
    ],
)  # fmt: skip
def test_what_errors_mean(status: int, content: object, kind: ErrorKind, code: int) -> None:
    error = call_error(status, content)
    assert isinstance(error, api_exceptions.GoogleAPICallError)
    found = cloud_error(error, "wanted")
    assert (found.kind, found.code) == (kind, code)
