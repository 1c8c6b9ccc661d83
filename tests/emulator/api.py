"""What the API tests share: a real client of the emulator, requests as they are usually written, polling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest
from google.api_core.exceptions import GoogleAPICallError
from google.cloud import tpu_v2alpha1 as tpu
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport

from tpu.emulator.emulator import Emulator

T = TypeVar("T")
ZONE = "us-central2-b"
V4 = {"accelerator_type": "v4-8", "runtime_version": "tpu-ubuntu2204-base"}


def parent(zone: str = ZONE) -> str:
    return f"projects/relay-emulated/locations/{zone}"


def node_name(node_id: str, zone: str = ZONE) -> str:
    return f"{parent(zone)}/nodes/{node_id}"


def queued_name(queued_id: str, zone: str = ZONE) -> str:
    return f"{parent(zone)}/queuedResources/{queued_id}"


class Api:
    """TpuAsyncClient with the key and a time-out in every call."""

    def __init__(self, client: tpu.TpuAsyncClient, endpoint: str, key: str) -> None:
        self.client = client
        self.endpoint = endpoint
        self.metadata = [("authorization", f"Bearer {key}")]

    async def call(self, method: str, /, **request: Any) -> Any:
        """Call a method such as `get_node` with the fields of its request."""
        return await getattr(self.client, method)(request=request, timeout=20, metadata=self.metadata)

    async def create_node(self, node_id: str, zone: str = ZONE, **fields: Any) -> Any:
        return await self.call(
            "create_node", parent=parent(zone), node_id=node_id, node=tpu.Node(**{**V4, **fields})
        )

    async def create_queued(self, queued_id: str, zone: str = ZONE, tier: Any = None, **fields: Any) -> Any:
        """Ask for a spot queued resource of one node, `<queued_id>-node`, unless told otherwise."""
        spec = {"parent": parent(zone), "node_id": f"{queued_id}-node", "node": {**V4, **fields}}
        wanted = tpu.QueuedResource({"tpu": {"node_spec": [spec]}, **(tier or {"spot": {}})})
        return await self.call(
            "create_queued_resource",
            parent=parent(zone),
            queued_resource_id=queued_id,
            queued_resource=wanted,
        )

    async def node_state(self, node_id: str, zone: str = ZONE) -> str:
        return (await self.call("get_node", name=node_name(node_id, zone))).state.name

    async def queued_state(self, queued_id: str, zone: str = ZONE) -> str:
        found = await self.call("get_queued_resource", name=queued_name(queued_id, zone))
        return found.state.state.name

    async def wait_node(self, node_id: str, state: str, zone: str = ZONE) -> None:
        await poll(lambda: self.node_state(node_id, zone), state)

    async def wait_node_exists(self, node_id: str, zone: str = ZONE) -> None:
        async def exists() -> bool:
            nodes = await self.call("list_nodes", parent=parent(zone))
            return node_name(node_id, zone) in [node.name for node in nodes.nodes]

        await poll(exists, True)

    async def wait_queued(self, queued_id: str, state: str, zone: str = ZONE) -> None:
        await poll(lambda: self.queued_state(queued_id, zone), state)

    async def operation(self, name: str) -> Any:
        """Return an operation as it is now."""
        return await self.client.get_operation({"name": name}, timeout=20, metadata=self.metadata)

    async def finish(self, operation: Any) -> Any:
        """Wait for an operation and return its typed result, or raise its error."""
        name = operation.operation.name

        async def done() -> bool:
            return (await self.operation(name)).done

        await poll(done, True)
        return await operation.result(timeout=20)

    async def delete_queued(self, queued_id: str, zone: str = ZONE, force: bool = True) -> Any:
        return await self.finish(
            await self.call("delete_queued_resource", name=queued_name(queued_id, zone), force=force)
        )

    async def delete_node(self, node_id: str, zone: str = ZONE) -> Any:
        return await self.finish(await self.call("delete_node", name=node_name(node_id, zone)))


@asynccontextmanager
async def api_of(emulator: Emulator) -> AsyncIterator[Api]:
    """Open a client of an emulator."""
    key = emulator.env["TPU_RELAY_API_KEY"]
    # The operations client takes no metadata of its own calls, so the key rides in the channel as well.
    endpoint = emulator.env["TPU_RELAY_API_ENDPOINT"]
    channel = grpc.aio.insecure_channel(endpoint, interceptors=[_Bearer(f"Bearer {key}")])
    client = tpu.TpuAsyncClient(transport=TpuGrpcAsyncIOTransport(channel=channel))
    try:
        yield Api(client, endpoint, key)
    finally:
        await client.transport.close()


class _Bearer(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, value: str) -> None:
        self._value = value

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = [(k, v) for k, v in client_call_details.metadata or () if k != "authorization"]
        details = client_call_details._replace(
            metadata=grpc.aio.Metadata(*metadata, ("authorization", self._value))
        )
        return await continuation(details, request)


async def poll(look: Callable[[], Awaitable[T]], wanted: T, timeout_s: float = 30.0) -> None:
    """Look again and again until what is seen is what is wanted."""
    deadline = time.monotonic() + timeout_s
    while (seen := await look()) != wanted:
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {wanted!r}, last seen: {seen!r}"
        await asyncio.sleep(0.03)


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """Return code name and message with which a call is refused."""
    with pytest.raises(GoogleAPICallError) as caught:
        await call
    code = caught.value.grpc_status_code
    assert code is not None
    return code.name, caught.value.message or ""
