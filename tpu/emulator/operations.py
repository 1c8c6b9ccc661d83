"""Long-running operations: their store, and the google.longrunning.Operations service over it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tpu.clock import Clock
from tpu.emulator import checks, errors, messages
from tpu.emulator.errors import ApiError
from tpu.emulator.names import Location, parse_location, parse_resource
from tpu.emulator.state import Background

_LONGEST_WAIT_SECONDS = 60.0


@dataclass(eq=False)
class _Running:
    message: Any
    location: Location
    task: asyncio.Task[Any] | None


class OperationStore:
    """Operations by name. Each runs as a task whose return value is the operation's typed response."""

    def __init__(self, clock: Clock, background: Background, luck: Random | None = None) -> None:
        self._clock = clock
        self._luck = luck or SystemRandom()
        self._background = background
        self._operations: dict[str, _Running] = {}
        self._requests: dict[tuple[str, str, str], str] = {}

    def start(self, location: Location, verb: str, target: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Start `work` as an operation on `target` and return the operation, not yet done."""
        running = self._new(location, verb, target)
        running.task = self._background.start(self._run(running, work))
        return running.message

    def finished(self, location: Location, verb: str, target: str, response: Any) -> Any:
        """Return an operation that was done at once."""
        running = self._new(location, verb, target)
        running.message.response.Pack(response)
        self._end(running.message)
        return running.message

    def failed(self, location: Location, verb: str, target: str, error: ApiError) -> Any:
        """Return an operation that failed at once."""
        running = self._new(location, verb, target)
        running.message.error.code, running.message.error.message = error.code, error.message
        self._end(running.message)
        return running.message

    def _new(self, location: Location, verb: str, target: str) -> _Running:
        name = location.child("operations", f"operation-{self._luck.getrandbits(64):016x}")
        message = operations_pb2.Operation(name=name)
        metadata = messages.OperationMetadata(target=target, verb=verb, api_version="v2alpha1")
        metadata.create_time.FromNanoseconds(int(self._clock.time() * 1e9))
        message.metadata.Pack(metadata)
        self._operations[name] = running = _Running(message, location, None)
        return running

    async def _run(self, running: _Running, work: Coroutine[Any, Any, Any]) -> None:
        message = running.message
        try:
            response = await work
        except ApiError as error:
            message.error.code, message.error.message = error.code, error.message
        except asyncio.CancelledError:
            message.error.code, message.error.message = 1, "The operation was cancelled."
            self._end(message)
            raise
        except Exception as error:
            # The server must answer whatever broke inside it, as the real one does: with code 13.
            message.error.code, message.error.message = 13, f"an internal error has occurred: {error!r}"
            self._end(message)
            raise
        else:
            message.response.Pack(response)
        self._end(message)

    def _end(self, message: Any) -> None:
        metadata = messages.OperationMetadata()
        message.metadata.Unpack(metadata)
        metadata.end_time.FromNanoseconds(int(self._clock.time() * 1e9))
        message.metadata.Pack(metadata)
        message.done = True

    def remember(self, method: str, target: str, request_id: str, operation: Any) -> None:
        """Note which operation answered a request id, so that its repetition gets the same answer."""
        if request_id:
            self._requests[method, target, request_id] = operation.name

    def recall(self, method: str, target: str, request_id: str) -> Any | None:
        """Return the operation that this request already started, or None."""
        name = self._requests.get((method, target, request_id)) if request_id else None
        return self._operations[name].message if name in self._operations else None

    def clear(self) -> None:
        self._operations.clear()
        self._requests.clear()

    def _find(self, name: str) -> _Running:
        parse_resource(name, "operations")
        if name not in self._operations:
            raise errors.not_found(name)
        return self._operations[name]

    async def get(self, request: Any) -> Any:
        return self._find(request.name).message

    async def list(self, request: Any) -> Any:
        location = parse_location(request.name.removesuffix("/operations"))
        inside = sorted(name for name, running in self._operations.items() if running.location == location)
        names, token = checks.page(inside, request.page_size, request.page_token)
        found = [self._operations[name].message for name in names]
        return operations_pb2.ListOperationsResponse(operations=found, next_page_token=token)

    async def cancel(self, request: Any) -> Any:
        """Ask an operation to stop; like the real one it says nothing about whether it will."""
        running = self._find(request.name)
        if not running.message.done:
            metadata = messages.OperationMetadata()
            running.message.metadata.Unpack(metadata)
            metadata.cancel_requested = True
            running.message.metadata.Pack(metadata)
        return empty_pb2.Empty()

    async def delete(self, request: Any) -> Any:
        running = self._find(request.name)
        if not running.message.done:
            raise ApiError(9, f"Operation '{request.name}' is still running: only finished ones are deleted.")
        del self._operations[request.name]
        return empty_pb2.Empty()

    async def wait(self, request: Any) -> Any:
        running = self._find(request.name)
        seconds = _LONGEST_WAIT_SECONDS
        if request.HasField("timeout"):
            seconds = min(seconds, request.timeout.ToNanoseconds() / 1e9)
        if running.task is not None and not running.message.done:
            await asyncio.wait([running.task], timeout=seconds)
        return running.message


# Request classes by method, for registering the service.
METHODS: dict[str, tuple[Any, str]] = {
    "GetOperation": (operations_pb2.GetOperationRequest, "get"),
    "ListOperations": (operations_pb2.ListOperationsRequest, "list"),
    "CancelOperation": (operations_pb2.CancelOperationRequest, "cancel"),
    "DeleteOperation": (operations_pb2.DeleteOperationRequest, "delete"),
    "WaitOperation": (operations_pb2.WaitOperationRequest, "wait"),
}
