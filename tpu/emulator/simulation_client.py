"""The client library's TpuAsyncClient, as far as it is used, over the emulated service in the same process.

The product's own GoogleTpuCloud runs on it: requests and answers are serialized as on a wire, so that conversion,
classification and tries again are those of real runs. A call takes a seeded time, may meet a seeded error, and is
counted by the minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from google.api_core.exceptions import from_grpc_status
from google.cloud import tpu_v2alpha1 as api
from google.longrunning import operations_pb2

from tpu.clock import Clock
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.errors import ApiError
from tpu.emulator.simulation_clock import context_of
from tpu.emulator.simulation_weather import CallWeather

# What each method answers with, as the client library types it.
_ANSWERS: dict[str, Any] = {
    "ListNodes": api.ListNodesResponse,
    "GetNode": api.Node,
    "ListQueuedResources": api.ListQueuedResourcesResponse,
    "GetQueuedResource": api.QueuedResource,
    "GetGuestAttributes": api.GetGuestAttributesResponse,
    "ListAcceleratorTypes": api.ListAcceleratorTypesResponse,
    "ListRuntimeVersions": api.ListRuntimeVersionsResponse,
}
_OPERATIONS = frozenset(
    {"CreateNode", "DeleteNode", "UpdateNode", "CreateQueuedResource", "DeleteQueuedResource"}
)
# Which limit of the API a method counts against.
_KINDS = {"Create": "create", "Delete": "delete", "Update": "update", "List": "list", "Get": "get"}


@dataclass(frozen=True)
class CallsAMinute:
    """Calls of one kind: most in any minute, and mean over the whole time. A page of a list is a call."""

    most: int
    mean: float


class CallCounts:
    """Calls by kind (create, delete, update, list, get, operation) and minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lists: Counter[tuple[str, int]] = Counter()

    def count(self, method: str) -> None:
        self._counts[kind_of(method), int(self._clock.monotonic() // 60)] += 1

    def count_list(self, zone: str) -> None:
        """Count a list by its first page."""
        self._lists[zone, int(self._clock.monotonic() // 60)] += 1

    def a_minute(self, begin_s: float = 0.0) -> dict[str, CallsAMinute]:
        """Calls a minute since `begin_s` of simulated time, by kind."""
        return self._a_minute(self._counts, begin_s)

    def lists_a_minute(self, begin_s: float = 0.0) -> dict[str, CallsAMinute]:
        """Whole lists a minute by zone, whatever their pages."""
        return self._a_minute(self._lists, begin_s)

    def _a_minute(self, counts: Counter[tuple[str, int]], begin_s: float) -> dict[str, CallsAMinute]:
        first, last = int(begin_s // 60), int(self._clock.monotonic() // 60)
        minutes = max(1, last - first)
        found = {}
        for key in sorted({key for key, _ in counts}):
            calls = [n for (k, minute), n in counts.items() if k == key and first <= minute < last]
            found[key] = CallsAMinute(max(calls, default=0), sum(calls) / minutes)
        return found


@cache
def kind_of(method: str) -> str:
    """Return the kind that a method counts as."""
    if method.endswith("Operation"):
        return "operation"
    return next((kind for prefix, kind in _KINDS.items() if method.startswith(prefix)), "other")


@dataclass(frozen=True)
class _Future:
    """What the client library returns for an operation; only the operation itself is used."""

    operation: Any


def _method(name: str) -> Callable[..., Awaitable[Any]]:
    """A method of the client: its time-out and metadata mean nothing here."""

    async def call(client: SimulatedClient, request: Any, **_: Any) -> Any:
        return await client.call(name, request)

    return call


class SimulatedClient:
    """The methods of TpuAsyncClient that GoogleTpuCloud calls."""

    def __init__(
        self, dispatcher: Dispatcher, key: str, clock: Clock, weather: CallWeather, luck: Random
    ) -> None:
        self._dispatcher = dispatcher
        self._authorization = f"Bearer {key}"
        self._clock = clock
        self._weather = weather
        self._luck = luck
        self._cloud_side = context_of("cloud")
        self.counts = CallCounts(clock)

    async def list_nodes(self, request: Any, **_: Any) -> Any:
        return await self._list("ListNodes", request)

    async def list_queued_resources(self, request: Any, **_: Any) -> Any:
        return await self._list("ListQueuedResources", request)

    get_node = _method("GetNode")
    get_queued_resource = _method("GetQueuedResource")
    get_guest_attributes = _method("GetGuestAttributes")
    list_accelerator_types = _method("ListAcceleratorTypes")
    list_runtime_versions = _method("ListRuntimeVersions")
    create_node = _method("CreateNode")
    delete_node = _method("DeleteNode")
    update_node = _method("UpdateNode")
    create_queued_resource = _method("CreateQueuedResource")
    delete_queued_resource = _method("DeleteQueuedResource")

    async def get_operation(self, request: operations_pb2.GetOperationRequest, **_: Any) -> Any:
        data = await self._send("GetOperation", request.SerializeToString())
        return operations_pb2.Operation.FromString(data)

    async def _list(self, method: str, request: Any) -> Any:
        if not request.page_token:
            self.counts.count_list(request.parent.rpartition("/")[2])
        return await self.call(method, request)

    async def call(self, method: str, request: Any) -> Any:
        """What the client library answers to a call of this method."""
        data = await self._send(method, type(request).serialize(request))
        if method in _OPERATIONS:
            return _Future(operations_pb2.Operation.FromString(data))
        return _ANSWERS[method].deserialize(data)

    async def _send(self, method: str, request: bytes) -> bytes:
        """Let the service answer, on its own account of CPU time.

        Raises:
            GoogleAPICallError: what the client library makes of the service's error.
        """
        self.counts.count(method)
        await self._clock.sleep(self._weather.latency(self._luck))
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_task(self._serve(method, request), context=self._cloud_side)
        except ApiError as error:
            raise from_grpc_status(error.status, error.message) from error

    async def _serve(self, method: str, request: bytes) -> bytes:
        fault = self._weather.fault(self._luck)
        if fault is not None and not fault.after:
            raise fault.error
        parsed = self._dispatcher.methods[method].request_class.FromString(request)
        answer = await self._dispatcher.answer(method, parsed, self._authorization)
        if fault is not None:
            raise fault.error
        return answer.SerializeToString()
