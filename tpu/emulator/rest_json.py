"""Between the JSON of the REST form and the messages of v2alpha1, which the service speaks. Pure.

Nothing here knows a single field: names and types come from the descriptors of the version that was called.
A call of v2 is read as v2, so that what v2 lacks is refused, and then carried over to v2alpha1 by name. The
lists of v1, which are all that is served of it, have the same fields as those of v2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.rpc import error_details_pb2

from tpu.emulator import messages
from tpu.emulator.errors import ApiError
from tpu.emulator.rest_fields import camel_case
from tpu.emulator.rest_routes import Match

_TYPE_PREFIX = "type.googleapis.com/"
_V2 = tpu_v2.Node.pb().DESCRIPTOR.file.package
# The one field that the versions spell differently, in v2 and in v2alpha1.
_V2_SPELLING = {"multisliceParams": "multiNodeParams"}
_ALPHA_SPELLING = {alpha: v2 for v2, alpha in _V2_SPELLING.items()}

# Parameters that Google's front ends take for every method; none of them changes what an answer says.
_SYSTEM_PARAMETERS = frozenset({"alt", "prettyPrint", "key", "quotaUser", "userIp", "uploadType"})

_HTTP = {1: 499, 3: 400, 4: 504, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 11: 400, 12: 501, 14: 503,
         16: 401}  # fmt: skip


def read_request(
    match: Match, query: Sequence[tuple[str, str]], body: Mapping[str, Any], request_class: Any
) -> Any:
    """The request that a call means, as `request_class` of the service.

    Raises:
        ApiError: there is no such field or parameter, or a value does not fit.
    """
    values: dict[str, Any] = {}
    if match.route.body == "*":
        values.update(body)
    elif match.route.body:
        values[match.route.body] = dict(body)
    elif body:
        raise _refused("The method takes no body.", "body")
    ours = request_class.DESCRIPTOR.file.package == messages.PACKAGE
    called_class = request_class
    if ours and match.version != "v2alpha1":
        called_class = getattr(tpu_v2, request_class.DESCRIPTOR.name).pb()
    for name, text in query:
        _set_parameter(values, called_class.DESCRIPTOR, name, text)
    for path, text in match.fields.items():
        _set(values, path.split("."), text)
    request = _parse(values, called_class)
    if called_class is request_class:
        return request
    return json_format.ParseDict(_renamed(json_format.MessageToDict(request), _V2_SPELLING), request_class())


def write_response(version: str, response: Any) -> dict[str, Any]:
    """A response of the service as the JSON of a version."""
    values = json_format.MessageToDict(response, descriptor_pool=messages.POOL)
    if version == "v2alpha1":
        return values
    if isinstance(response, operations_pb2.Operation):
        return _operation_as_v2(values)
    if isinstance(response, operations_pb2.ListOperationsResponse):
        return {**values, "operations": [_operation_as_v2(item) for item in values.get("operations", [])]}
    if response.DESCRIPTOR.file.package == messages.PACKAGE:
        return _as_v2(values, response.DESCRIPTOR.name)
    return values


def write_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error, and its body."""
    status = _HTTP.get(error.code, 500)
    content: dict[str, Any] = {"code": status, "message": error.message, "status": error.status.name}
    if error.details:
        content["details"] = [
            {"@type": f"{_TYPE_PREFIX}{detail.DESCRIPTOR.full_name}", **json_format.MessageToDict(detail)}
            for detail in error.details
        ]
    return status, {"error": content}


# --- requests ---------------------------------------------------------------------------------------


def _set(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values.pop(camel_case(path[-1]), None)  # the path wins over a name in the body, however that is spelt
    values[path[-1]] = value


def _set_parameter(values: dict[str, Any], descriptor: Descriptor, name: str, text: str) -> None:
    """Set what a query parameter says; one of a repeated field is added to those before."""
    if name in _SYSTEM_PARAMETERS or name.startswith("$"):
        return
    fields = {spelling: field for field in descriptor.fields for spelling in (field.name, field.json_name)}
    field = fields.get(name)
    if field is None:
        raise _refused(f'Unknown name "{name}": Cannot bind query parameter.', name)
    if field.is_repeated:
        values.setdefault(field.name, []).append(text)
    elif field.message_type is not None and field.message_type.full_name == "google.protobuf.FieldMask":
        values[field.name] = ",".join(camel_case(path.strip()) for path in text.split(","))
    elif field.type == FieldDescriptor.TYPE_BOOL:
        if text.lower() not in ("true", "false"):  # gcloud writes True
            raise _refused(f"Invalid value at '{field.name}' (TYPE_BOOL), \"{text}\"", field.name)
        values[field.name] = text.lower() == "true"
    elif field.message_type is not None:
        raise _refused(f'Unknown name "{name}": Cannot bind query parameter.', name)
    else:
        values[field.name] = text


def _parse(values: dict[str, Any], request_class: Any) -> Any:
    try:
        return json_format.ParseDict(values, request_class())
    except json_format.ParseError as error:
        text = str(error)
        unknown = re.search(r'has no field named "([^"]*)" at "([^"]*)"', text)
        if unknown is None:
            raise _refused(text, "") from None
        name, place = unknown[1], unknown[2].partition(".")[2]
        at = f" at '{_snake(place)}'" if place else ""
        raise _refused(f'Unknown name "{name}"{at}: Cannot find field.', _snake(place)) from None


def _refused(description: str, field: str) -> ApiError:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    text = f"Invalid JSON payload received. {description}"
    return ApiError(3, text, (error_details_pb2.BadRequest(field_violations=[violation]),))


# --- versions ---------------------------------------------------------------------------------------


def _as_v2(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Values of a v2alpha1 message as those of the v2 message of that name: what v2 lacks is left out."""
    message_class = message_factory.GetMessageClass(Default().FindMessageTypeByName(f"{_V2}.{name}"))
    renamed = _renamed(values, _ALPHA_SPELLING)
    return json_format.MessageToDict(
        json_format.ParseDict(renamed, message_class(), ignore_unknown_fields=True)
    )


def _operation_as_v2(operation: dict[str, Any]) -> dict[str, Any]:
    metadata = {**_packed_as_v2(operation["metadata"]), "apiVersion": "v2"}
    shown = {**operation, "metadata": metadata}
    if "response" in operation:
        deletes = metadata["verb"] == "delete"  # of a queued resource too: v2 answers with nothing
        empty = {"@type": f"{_TYPE_PREFIX}google.protobuf.Empty"}
        shown["response"] = empty if deletes else _packed_as_v2(operation["response"])
    return shown


def _packed_as_v2(packed: dict[str, Any]) -> dict[str, Any]:
    values = dict(packed)
    name = values.pop("@type").removeprefix(f"{_TYPE_PREFIX}{messages.PACKAGE}.")
    return {"@type": f"{_TYPE_PREFIX}{_V2}.{name}", **_as_v2(values, name)}


def _renamed(values: Any, names: Mapping[str, str]) -> Any:
    if isinstance(values, list):
        return [_renamed(item, names) for item in values]
    if isinstance(values, dict):
        return {names.get(name, name): _renamed(item, names) for name, item in values.items()}
    return values


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name)


def not_a_method(verb: str, path: str) -> ApiError:
    return ApiError(5, f"Method not found: {verb} {path} is none of the Cloud TPU API's.")


def not_json(text: str) -> ApiError:
    return ApiError(3, f"Invalid JSON payload received. {text}")
