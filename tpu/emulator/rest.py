"""The REST form of v2 and v2alpha1 over the same methods as gRPC, for gcloud and other public clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tpu.emulator import rest_fields, rest_json, rest_routes
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.errors import ApiError

# All that `gcloud compute tpus tpu-vm ssh` asks Compute Engine for: are there SSH keys of the whole project?
_COMPUTE_PROJECT = re.compile(r"/compute/[^/]+/projects/([^/]+)")
_FIELDS = ("fields", "$fields")
_LARGEST_BODY = 4 * 1024 * 1024  # metadata alone may have 512 KB


def application(dispatcher: Dispatcher) -> web.Application:
    """The HTTP application over all methods of a dispatcher."""

    async def serve(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _answer(dispatcher, request))
        except ApiError as error:
            status, content = rest_json.write_error(error)
            return web.json_response(content, status=status)
        except web.HTTPRequestEntityTooLarge as error:
            status, content = rest_json.write_error(
                ApiError(3, f"Request payload is too large. {error.text}")
            )
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
    query = [(name, text) for name, text in request.query.items() if name not in _FIELDS]
    fields = next((request.query[name] for name in _FIELDS if name in request.query), None)
    fields = fields or request.headers.get("X-Goog-FieldMask")
    selection = rest_fields.parse(fields) if fields else {}
    message = rest_json.read_request(match, query, _object(await request.read()), method.request_class)
    response = await dispatcher.answer(match.route.method, message, authorization)
    return rest_fields.select(selection, rest_json.write_response(match.version, response))


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
