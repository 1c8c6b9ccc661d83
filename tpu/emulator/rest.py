"""The REST form of v2 and v2alpha1 over the same methods as gRPC, for gcloud and other public clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tpu.emulator import rest_json, rest_routes
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.errors import ApiError

# All that `gcloud compute tpus tpu-vm ssh` asks Compute Engine for: are there SSH keys of the whole project?
_COMPUTE_PROJECT = re.compile(r"/compute/[^/]+/projects/([^/]+)")
_LARGEST_BODY = 4 * 1024 * 1024  # metadata alone may have 512 KB


def application(dispatcher: Dispatcher) -> web.Application:
    """The HTTP application over all methods of a dispatcher."""

    async def serve(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _answer(dispatcher, request))
        except ApiError as error:
            status, content = rest_json.write_error(error)
            return web.json_response(content, status=status)

    app = web.Application(client_max_size=_LARGEST_BODY)
    app.router.add_route("*", "/{path:.*}", serve)
    return app


async def _answer(dispatcher: Dispatcher, request: web.Request) -> dict[str, Any]:
    authorization = request.headers.get("Authorization", "")
    dispatcher.check_key(authorization)
    if project := _COMPUTE_PROJECT.fullmatch(request.path):
        return {"kind": "compute#project", "name": project[1], "commonInstanceMetadata": {}}
    match = rest_routes.find(request.method, request.path)
    if match is None:
        raise rest_json.not_a_method(request.method, request.path)
    method = dispatcher.methods[match.route.method]
    body = _object(await request.read())
    message = rest_json.read_request(match, list(request.query.items()), body, method.request_class)
    response = await dispatcher.answer(match.route.method, message, authorization)
    return rest_json.write_response(match.version, response)


def _object(data: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; an empty body is an empty object.

    Raises:
        ApiError: it is none.
    """
    try:
        found = json.loads(data) if data.strip() else {}
    except ValueError as error:
        raise rest_json.not_json(str(error)) from None
    if not isinstance(found, dict):
        raise rest_json.not_json("Root element must be a message.")
    return found
