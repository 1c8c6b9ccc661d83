"""Which method a REST call means: HTTP verb and path to method and the request's fields in the path. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

VERSIONS = ("v2", "v2alpha1", "v1")


@dataclass(frozen=True)
class Route:
    """One method's HTTP rule. `body` is the field that the body holds, `*` for the whole request."""

    method: str
    verb: str
    pattern: re.Pattern[str]
    fields: tuple[str, ...]
    body: str = ""


@dataclass(frozen=True)
class Match:
    """What a path means: the API's version, the rule, and the fields that the path gives."""

    version: str
    route: Route
    fields: Mapping[str, str]


def _route(method: str, rule: str, body: str = "") -> Route:
    """Read a rule as the API's documentation writes it: `GET {name=projects/*/locations/*/nodes/*}:stop`."""
    verb, template = rule.split(" ")
    fields = tuple(re.findall(r"\{([a-z_.]+)=", template))
    pattern = re.sub(r"\{[a-z_.]+=([^}]*)\}", r"(\1)", template).replace("*", "[^/:]+")
    return Route(method, verb, re.compile(pattern), fields, body)


_ZONE = "projects/*/locations/*"
_NODE = f"{_ZONE}/nodes/*"
_QUEUED = f"{_ZONE}/queuedResources/*"
_OPERATION = f"{_ZONE}/operations/*"

_ROUTES = (
    _route("ListNodes", f"GET {{parent={_ZONE}}}/nodes"),
    _route("GetNode", f"GET {{name={_NODE}}}"),
    _route("CreateNode", f"POST {{parent={_ZONE}}}/nodes", "node"),
    _route("DeleteNode", f"DELETE {{name={_NODE}}}"),
    _route("StopNode", f"POST {{name={_NODE}}}:stop", "*"),
    _route("StartNode", f"POST {{name={_NODE}}}:start", "*"),
    _route("UpdateNode", f"PATCH {{node.name={_NODE}}}", "node"),
    _route("GetGuestAttributes", f"POST {{name={_NODE}}}:getGuestAttributes", "*"),
    _route("SimulateMaintenanceEvent", f"POST {{name={_NODE}}}:simulateMaintenanceEvent", "*"),
    _route("ListQueuedResources", f"GET {{parent={_ZONE}}}/queuedResources"),
    _route("GetQueuedResource", f"GET {{name={_QUEUED}}}"),
    _route("CreateQueuedResource", f"POST {{parent={_ZONE}}}/queuedResources", "queued_resource"),
    _route("DeleteQueuedResource", f"DELETE {{name={_QUEUED}}}"),
    _route("ResetQueuedResource", f"POST {{name={_QUEUED}}}:reset", "*"),
    _route("GenerateServiceIdentity", f"POST {{parent={_ZONE}}}:generateServiceIdentity", "*"),
    _route("ListAcceleratorTypes", f"GET {{parent={_ZONE}}}/acceleratorTypes"),
    _route("GetAcceleratorType", f"GET {{name={_ZONE}/acceleratorTypes/*}}"),
    _route("ListRuntimeVersions", f"GET {{parent={_ZONE}}}/runtimeVersions"),
    _route("GetRuntimeVersion", f"GET {{name={_ZONE}/runtimeVersions/*}}"),
    _route("ListOperations", f"GET {{name={_ZONE}}}/operations"),
    _route("GetOperation", f"GET {{name={_OPERATION}}}"),
    _route("CancelOperation", f"POST {{name={_OPERATION}}}:cancel", "*"),
    _route("DeleteOperation", f"DELETE {{name={_OPERATION}}}"),
    _route("ListLocations", "GET {name=projects/*}/locations"),
    _route("GetLocation", f"GET {{name={_ZONE}}}"),
)
_ONLY_ALPHA = frozenset({"SimulateMaintenanceEvent"})
# What gcloud still asks v1 for.
_OF_V1 = frozenset({"ListAcceleratorTypes", "GetAcceleratorType", "ListLocations", "GetLocation"})


def routes(version: str) -> Iterator[Route]:
    """All routes of a version of the API."""
    if version == "v1":
        return (route for route in _ROUTES if route.method in _OF_V1)
    return (route for route in _ROUTES if version == "v2alpha1" or route.method not in _ONLY_ALPHA)


def find(verb: str, path: str) -> Match | None:
    """What a verb and a path such as `/v2/projects/p/locations/z/nodes` mean; None if nothing."""
    version, _, rest = path.removeprefix("/").partition("/")
    if version not in VERSIONS:
        return None
    for route in routes(version):
        if route.verb == verb and (match := route.pattern.fullmatch(rest)):
            return Match(version, route, dict(zip(route.fields, match.groups(), strict=True)))
    return None
