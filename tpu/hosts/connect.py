"""Connect to all hosts of a slice: wait until SSH is up, by the configured route, with pinned host keys."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import asyncssh

from tpu.clock import Clock, SystemClock
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.errors import HostKeyRefused, HostUnreachable
from tpu.hosts.group import HostConnection, HostGroup, describe_error
from tpu.hosts.identity import Identity
from tpu.hosts.route import Jump, Route, RouteError, route_to

__all__ = ["HostKeyRefused", "HostUnreachable", "RouteError", "connect_all"]

# One try: a booting VM swallows packets, and another try is cheap.
TRY_S = 10.0
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 5.0
REPORT_EVERY_S = 15.0
AT_ONCE = 64
# A host that is silent for interval × (count + 1) is given up by SSH itself: 15 s.
KEEPALIVE_S, KEEPALIVE_COUNT = 5.0, 2


@contextlib.asynccontextmanager
async def connect_all(
    hosts: Sequence[HostAddress],
    identity: Identity,
    connection: Connection,
    deadline_s: float,
    report: Callable[[str], None],
    *,
    allow_unpinned: bool = False,
    clock: Clock | None = None,
) -> AsyncIterator[HostGroup]:
    """Connections to all of `hosts`, closed at the end of the block.

    Refused connections, time-outs and refused user keys are tried again until `deadline_s`, since a VM that has
    just booted shows all three. `report` hears who is waited for. A host without a published key is refused
    unless `allow_unpinned`.

    Raises:
        HostUnreachable: not all were connected in time; names each missing one and why.
        HostKeyRefused: a host has no published key or shows another one. Not tried again.
        RouteError: the route cannot lead to a host.
    """
    clock = clock or SystemClock()
    routes = [route_to(host, connection) for host in hosts]
    unpinned = {h.name: "it has published no host key" for h in hosts if h.host_key is None}
    if unpinned and not allow_unpinned:
        raise HostKeyRefused(unpinned)
    deadline = clock.monotonic() + deadline_s
    waiting = {host.name: "not tried yet" for host in hosts}
    async with contextlib.AsyncExitStack() as stack:
        reporter = asyncio.create_task(_report_waiting(waiting, len(hosts), clock, report))
        stack.callback(reporter.cancel)
        jumps = await _open_jumps(routes, identity, connection, deadline, clock, stack)
        limit = asyncio.Semaphore(AT_ONCE)

        async def open_one(host: HostAddress, route: Route) -> HostConnection | None:
            async def attempt() -> asyncssh.SSHClientConnection:
                async with limit:
                    options = _options(identity, connection.ssh_user, _pinned(host))
                    return await _open(route, options, jumps.get(route.jump) if route.jump else None)

            ssh = await _until_connected(host.name, attempt, deadline, clock, waiting)
            if ssh is None:
                return None
            member = HostConnection(host, ssh)
            stack.push_async_callback(member.close)
            return member

        opened = await _all_or_first_error([open_one(h, r) for h, r in zip(hosts, routes, strict=True)])
        reporter.cancel()
        if waiting:
            raise HostUnreachable(waiting)
        yield HostGroup([member for member in opened if member])


async def _all_or_first_error(actions: Sequence[Awaitable[Any]]) -> list[Any]:
    """Like gather, but nothing goes on behind the caller's back after an error."""
    tasks = [asyncio.ensure_future(action) for action in actions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_connected(
    name: str,
    attempt: Callable[[], Awaitable[asyncssh.SSHClientConnection]],
    deadline: float,
    clock: Clock,
    waiting: dict[str, str],
) -> asyncssh.SSHClientConnection | None:
    """Try until the deadline. On success the name leaves `waiting`; else the last reason stays there."""
    pause_s = RETRY_FIRST_S
    while True:
        try:
            # At least a second for the last try, or a short deadline would never try at all.
            async with asyncio.timeout(max(1.0, min(TRY_S, deadline - clock.monotonic()))):
                ssh = await attempt()
            del waiting[name]
            return ssh
        except asyncssh.HostKeyNotVerifiable as error:
            reason = "it shows another host key than the one it published: it may be another machine"
            raise HostKeyRefused({name: reason}) from error
        except TimeoutError:
            waiting[name] = "SSH did not answer"
        except (asyncssh.Error, OSError) as error:
            waiting[name] = describe_error(error)
        left_s = deadline - clock.monotonic()
        if left_s <= 0:
            return None
        await clock.sleep(min(pause_s, left_s))
        pause_s = min(RETRY_MOST_S, pause_s * 1.5)


async def _open(
    route: Route, options: dict[str, Any], jump: asyncssh.SSHClientConnection | None
) -> asyncssh.SSHClientConnection:
    if jump is not None:
        options["tunnel"] = jump
    if not route.command:
        return await asyncssh.connect(route.address, route.port, **options)
    # asyncssh would read a proxy's stderr as part of the SSH stream, and take its closing for the stream's end:
    # it goes to a file, as the best reason for a failure, while descriptor 3 holds the pipe open.
    with tempfile.NamedTemporaryFile(prefix="relay-proxy-") as said:
        options["proxy_command"] = ["/bin/sh", "-c", 'exec "$@" 3>&2 2>"$0"', said.name, *route.command]
        try:
            return await asyncssh.connect(route.address, route.port, **options)
        except (asyncssh.ConnectionLost, OSError) as error:
            words = Path(said.name).read_text(errors="replace").strip().splitlines()
            raise OSError(f"{route.command[0]}: {words[-1] if words else describe_error(error)}") from error


async def _open_jumps(
    routes: Sequence[Route],
    identity: Identity,
    connection: Connection,
    deadline: float,
    clock: Clock,
    stack: contextlib.AsyncExitStack,
) -> dict[Jump, asyncssh.SSHClientConnection]:
    """One connection to each machine that routes lead through."""
    opened: dict[Jump, asyncssh.SSHClientConnection] = {}
    for jump in dict.fromkeys(route.jump for route in routes if route.jump):
        known = connection.home / "known_hosts"
        if not known.exists():
            raise RouteError(
                f"the host key of {jump.host} must be known: put its line (`ssh-keyscan -p {jump.port} {jump.host}`, "
                f"checked with its owner) into {known}"
            )

        async def attempt(jump: Jump = jump, known: Path = known) -> asyncssh.SSHClientConnection:
            options = _options(identity, jump.user, str(known))
            return await asyncssh.connect(jump.host, jump.port, **options)

        name = f"jump host {jump.host}"
        waiting = {name: "not tried yet"}
        ssh = await _until_connected(name, attempt, deadline, clock, waiting)
        if ssh is None:
            raise HostUnreachable(waiting)
        stack.push_async_callback(ssh.wait_closed)
        stack.callback(ssh.abort)
        opened[jump] = ssh
    return opened


def _pinned(host: HostAddress) -> Any:
    """What asyncssh takes as known hosts: exactly this key, or (None) any."""
    if host.host_key is None:
        return None
    try:
        return ([asyncssh.import_public_key(host.host_key)], [], [])
    except asyncssh.KeyImportError as error:
        raise HostKeyRefused({host.name: f"its published host key is malformed: {error}"}) from error


def _options(identity: Identity, user: str, known_hosts: Any) -> dict[str, Any]:
    """Everything said explicitly: no configuration, agent or key of the user's own takes part."""
    return {
        "config": None,
        "username": user,
        "client_keys": [str(identity.private_key_path)],
        "agent_path": None,
        "known_hosts": known_hosts,
        "preferred_auth": "publickey",
        "gss_host": None,
        "compression_algs": None,
        "keepalive_interval": KEEPALIVE_S,
        "keepalive_count_max": KEEPALIVE_COUNT,
    }


async def _report_waiting(
    waiting: dict[str, str], total: int, clock: Clock, report: Callable[[str], None]
) -> None:
    pause_s = REPORT_EVERY_S / 3
    while True:
        await clock.sleep(pause_s)
        pause_s = REPORT_EVERY_S
        if waiting:
            names = ", ".join(sorted(waiting)[:4]) + (" …" if len(waiting) > 4 else "")
            reasons = " / ".join(sorted(set(waiting.values()))[:3])
            report(f"waiting for SSH of {len(waiting)} of {total} host(s): {names} ({reasons})")
