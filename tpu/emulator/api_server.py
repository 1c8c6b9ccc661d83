"""The gRPC server: Cloud TPU, long-running operations and locations, on one loopback port."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import status_pb2

from tpu.emulator.dispatch import Dispatcher, Method
from tpu.emulator.errors import ApiError

_GRACE_SECONDS = 0.2


class ApiServer:
    """Serves all methods of a dispatcher over gRPC."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        for name, method in dispatcher.methods.items():
            services.setdefault(method.service, {})[name] = self._handler(name, method)
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(*service) for service in services.items())
        )

    async def start(self) -> int:
        """Listen on a free port of 127.0.0.1 and return it."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(_GRACE_SECONDS)

    def _handler(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        async def serve(request: Any, context: Any) -> Any:
            authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
            try:
                return await self._dispatcher.answer(name, request, authorization)
            except ApiError as error:
                if error.details:
                    context.set_trailing_metadata((("grpc-status-details-bin", _status(error)),))
                await context.abort(error.status, error.message)

        return grpc.unary_unary_rpc_method_handler(
            serve,  # pyright: ignore[reportArgumentType]  # the stubs know only the blocking kind
            request_deserializer=method.request_class.FromString,
            response_serializer=_serialize,
        )


def _status(error: ApiError) -> bytes:
    status = status_pb2.Status(code=error.code, message=error.message)
    for detail in error.details:
        status.details.add().Pack(detail)
    return status.SerializeToString()


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()
