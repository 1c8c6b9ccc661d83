"""The REST form of v2 and v2alpha1 over the same methods as gRPC, for gcloud and other public clients."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any

from aiohttp import web

from tpu.emulator import project, rest_fields, rest_json, rest_routes
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.errors import ApiError
from tpu.emulator.state import Settings

_FIELDS = ("fields", "$fields")
_LARGEST_BODY = 4 * 1024 * 1024  # metadata alone may have 512 KB


def application(
    dispatcher: Dispatcher, project_name: str, settings: Callable[[], Settings]
) -> web.Application:
    """The HTTP application over all methods of a dispatcher, and the other services of a project."""

    async def serve(request: web.Request) -> web.Response:
        response = await answer(request)
        if ahead_s := settings().project.clock_ahead_s:
            response.headers["Date"] = formatdate(time.time() + ahead_s, usegmt=True)
        return response

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _answer(dispatcher, request, project_name, settings()))
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


async def _answer(
    dispatcher: Dispatcher, request: web.Request, project_name: str, settings: Settings
) -> dict[str, Any]:
    authorization = request.headers.get("Authorization", "")
    dispatcher.check_key(authorization)
    body = _object(await request.read())
    found = project.answer(
        settings.project, settings.limits, project_name, request.method, request.path, body
    )
    if found is not None:
        return found
    match = rest_routes.find(request.method, request.path)
    if match is None:
        raise rest_json.not_a_method(request.method, request.path)
    method = dispatcher.methods[match.route.method]
    query = [(name, text) for name, text in request.query.items() if name not in _FIELDS]
    fields = next((request.query[name] for name in _FIELDS if name in request.query), None)
    fields = fields or request.headers.get("X-Goog-FieldMask")
    selection = rest_fields.parse(fields) if fields else {}
    message = rest_json.read_request(match, query, body, method.request_class)
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
