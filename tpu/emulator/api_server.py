"""The gRPC server: Cloud TPU, long-running operations and locations, on one loopback port."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.cloud.location import locations_pb2

from tpu.emulator import errors, messages, operations, tpu_service
from tpu.emulator.errors import ApiError
from tpu.emulator.faults import Faults
from tpu.emulator.operations import OperationStore
from tpu.emulator.tpu_service import TpuService

_log = logging.getLogger(__name__)

_Handler = Callable[[Any], Awaitable[Any]]
_GRACE_SECONDS = 0.2


class ApiServer:
    """Serves the API to callers that bring the key as a bearer token."""

    def __init__(self, service: TpuService, store: OperationStore, faults: Faults, key: str) -> None:
        self._faults = faults
        self._key = key
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        tpu = {
            name: self._method(name, getattr(service, name), messages.request(name))
            for name in tpu_service.METHODS
        }
        running = {
            name: self._method(name, getattr(store, attribute), request)
            for name, (request, attribute) in operations.METHODS.items()
        }
        locations = {
            "ListLocations": self._method(
                "ListLocations", service.ListLocations, locations_pb2.ListLocationsRequest
            ),
            "GetLocation": self._method("GetLocation", service.GetLocation, locations_pb2.GetLocationRequest),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("google.cloud.tpu.v2alpha1.Tpu", tpu),
                grpc.method_handlers_generic_handler("google.longrunning.Operations", running),
                grpc.method_handlers_generic_handler("google.cloud.location.Locations", locations),
            )
        )

    @staticmethod
    def method_names() -> frozenset[str]:
        """Return the names of all methods that are served."""
        return frozenset((*tpu_service.METHODS, *operations.METHODS, "ListLocations", "GetLocation"))

    async def start(self) -> int:
        """Listen on a free port of 127.0.0.1 and return it."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(_GRACE_SECONDS)

    def _method(self, name: str, handler: _Handler, request_class: Any) -> grpc.RpcMethodHandler:
        async def serve(request: Any, context: Any) -> Any:
            try:
                return await self._answer(name, handler, request, context)
            except ApiError as error:
                await context.abort(error.status, error.message)
            except Exception as error:
                # A bug of ours must look like one of the API's: code 13, and be found in the log.
                _log.exception("%s failed", name)
                await context.abort(grpc.StatusCode.INTERNAL, f"an internal error has occurred: {error!r}")

        return grpc.unary_unary_rpc_method_handler(
            serve,  # pyright: ignore[reportArgumentType]  # the stubs know only the blocking kind
            request_deserializer=request_class.FromString,
            response_serializer=_serialize,
        )

    async def _answer(self, name: str, handler: _Handler, request: Any, context: Any) -> Any:
        sent = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {self._key}".encode()):
            raise errors.unauthenticated()
        fault = self._faults.take(name)
        if fault is not None and not fault.after:
            raise fault.error
        response = await handler(request)
        if fault is not None:
            raise fault.error
        return response


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()
