"""The way to a host: which address, and through what. Pure, so that a preflight can show it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tpu.connection import Connection
from tpu.hosts.address import HostAddress

IAP_COMMAND = (
    "gcloud compute start-iap-tunnel %n %p --listen-on-stdin --project=%j --zone=%z --verbosity=warning"
)


class RouteError(ValueError):
    """The route cannot lead to this host; the message names what is missing and what to set."""


@dataclass(frozen=True)
class Jump:
    """A machine that is connected to first. Its host key must stand in `known_hosts` of the settings' folder."""

    user: str
    host: str
    port: int


@dataclass(frozen=True)
class Route:
    """At most one of `command` and `jump` is set; without either, `address` is connected to directly."""

    address: str
    port: int
    command: tuple[str, ...] = ()
    jump: Jump | None = None


def route_to(host: HostAddress, connection: Connection) -> Route:
    """How `host` is reached under `connection.ssh_route`.

    Raises:
        RouteError: the route is malformed, or needs what the host does not have.
    """
    route, port = connection.ssh_route, connection.ssh_port
    if route == "external":
        if host.external is None:
            raise RouteError(
                f"{host.name} has no external address: set TPU_RELAY_SSH_ROUTE to internal (same network), iap, "
                "jump:user@host:port, or a ProxyCommand with %h and %p"
            )
        return Route(host.external, port)
    if route == "internal":
        return Route(host.internal, port)
    if route.startswith("jump:"):
        return Route(host.internal, port, jump=_jump(route))
    template = IAP_COMMAND if route == "iap" else route
    if route != "iap" and "%h" not in template and "%n" not in template:
        raise RouteError(
            "TPU_RELAY_SSH_ROUTE must be external, internal, iap, jump:user@host:port, or a ProxyCommand "
            f"with %h and %p, found {route!r}"
        )
    return Route(host.internal, port, command=_command(template, host, connection))


def _jump(route: str) -> Jump:
    found = re.fullmatch(r"jump:([^@\s]+)@(\[[^\]]+\]|[^:\s\[\]]+)(?::(\d{1,5}))?", route)
    if not found:
        raise RouteError(f"a jump is written jump:user@host:port, found {route!r}")
    return Jump(found[1], found[2].strip("[]"), int(found[3] or 22))


def _command(template: str, host: HostAddress, connection: Connection) -> tuple[str, ...]:
    """Split first, then fill in: an address is never read as a part of the command."""
    values = {
        "h": host.internal,
        "p": str(connection.ssh_port),
        "n": host.hostname,
        "z": host.zone,
        "j": connection.project,
        "%": "%",
    }

    def fill(found: re.Match[str]) -> str:
        value = values.get(found[1], found[0])
        if value is None:
            missing = "host name" if found[1] == "n" else "zone"
            raise RouteError(f"the route needs the {missing} of {host.name}, which the cloud has not told")
        return value

    return tuple(re.sub(r"%(.)", fill, word) for word in shlex.split(template))
