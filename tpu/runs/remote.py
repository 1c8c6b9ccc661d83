"""Reach into a run that trains: log in to its hosts, ask its trainer for a profile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu.checkpoint import files
from tpu.checkpoint.fence import load_fence
from tpu.cloud import CloudError, ErrorKind
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import connect_all
from tpu.hosts.gang import GangSpec
from tpu.hosts.group import HostConnection
from tpu.hosts.identity import ensure_identity
from tpu.hosts.route import RouteError, route_to
from tpu.runs.event_log import RunEvent, candidate_of, load_events
from tpu.runs.record import RunRecord, load_record
from tpu.slices.hosts import host_addresses
from tpu.train.profile import REQUEST

CONNECT_S = 20.0
# A program that looks for requests does so at every call border, and a call lasts under 5 s; it may compile before.
TAKEN_UP_S = 300.0
TRACE_S = 1800.0
LOOK_S = 1.0


class HostNotReady(RuntimeError):
    """The run has no slice whose hosts can be reached; the message says what it has."""


class NoSuchHost(ValueError):
    """The slice has fewer hosts; the message says how many."""


class ProfileFailed(RuntimeError):
    """No trace came; the message says why."""


async def hosts_of(connection: Connection, run_dir: str) -> tuple[HostAddress, ...]:
    """Hosts of the slice that a run has now, whether it trains on it yet or not.

    Raises:
        HostNotReady: there is no such slice now.
        tpu.runs.record.RunNotFound: there is no such run.
    """
    record = load_record(run_dir)
    events = load_events(run_dir)
    name = newest_slice(events)
    if name is None:
        run = record.config.name
        raise HostNotReady(f"{run} has no slice now: start it with `python -m flows.train --resume {run}`")
    return await _addresses(connection, record, name, candidate_of(events, name).zone)


def newest_slice(events: Sequence[RunEvent]) -> str | None:
    """The newest slice that was ready, made or taken from the pool, and is neither deleted nor given back yet."""
    ready = None
    for event in events:
        if event.kind in ("slice-ready", "slice-leased"):
            ready = event.detail["slice"]
        elif event.kind in ("slice-deleted", "slice-released") and event.detail["slice"] == ready:
            ready = None
    return ready


async def _addresses(
    connection: Connection, record: RunRecord, name: str, zone: str
) -> tuple[HostAddress, ...]:
    try:
        async with open_cloud(connection) as cloud:
            return await host_addresses(cloud, zone, await cloud.get_node(zone, name))
    except CloudError as error:
        # A preempted node is found for a while, but its hosts' keys are not given any more.
        if error.kind not in (ErrorKind.NOT_FOUND, ErrorKind.PREEMPTED, ErrorKind.WRONG_STATE):
            raise
        raise HostNotReady(f"slice {name} of {record.config.name} is gone from {zone}") from error


def pick_host(hosts: Sequence[HostAddress], index: int) -> HostAddress:
    """The host of that number. Raises NoSuchHost if there is none."""
    if index >= len(hosts):
        have = "one host, 0" if len(hosts) == 1 else f"{len(hosts)} hosts, 0 to {len(hosts) - 1}"
        raise NoSuchHost(f"there is no host {index}: {hosts[0].slice} has {have}")
    return hosts[index]


async def login_command(
    connection: Connection, run_dir: str, index: int, words: Sequence[str] = ()
) -> list[str]:
    """The OpenSSH command line that logs in to a host, or runs `words` there as `ssh` would.

    Raises:
        HostNotReady, NoSuchHost: there is no such host now.
        tpu.hosts.route.RouteError: the configured route cannot lead to it.
    """
    host = pick_host(await hosts_of(connection, run_dir), index)
    identity = ensure_identity(connection.home)
    if host.host_key is None:
        raise HostNotReady(f"{host.name} has not published its host key yet; try again in a moment")
    known = connection.home / "pinned_hosts" / f"{Path(run_dir).name}-w{index}"
    write_pinned(known, host)
    return ssh_command(connection, host, identity.private_key_path, known, words)


def write_pinned(known: Path, host: HostAddress) -> None:
    """The one key by which `host` is known, under its name, as an OpenSSH file of known hosts."""
    known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = known.with_name(f"{known.name}.{os.getpid()}")
    part.write_text(f"{host.name} {host.host_key}\n")
    part.replace(known)


def ssh_command(
    connection: Connection, host: HostAddress, key: Path, known: Path, words: Sequence[str] = ()
) -> list[str]:
    """An OpenSSH command line by the configured route. No configuration, agent or key of the user's takes part.

    Raises:
        tpu.hosts.route.RouteError: the route cannot lead to this host.
    """
    route = route_to(host, connection)
    command = [*_ssh(key, known), "-o", f"HostKeyAlias={host.name}"]
    if route.jump is not None:
        through = [
            *_ssh(key, connection.home / "known_hosts"),
            "-p",
            str(route.jump.port),
            "-l",
            route.jump.user,
        ]
        command += _proxy([*through, "-W", f"[{route.address}]:{route.port}", route.jump.host])
    elif route.command:
        command += _proxy(route.command)
    # Behind the address come the words of the command, never options, so `--` is not wanted there.
    return [*command, "-p", str(route.port), "-l", connection.ssh_user, route.address, *words]


def _ssh(key: Path, known: Path) -> list[str]:
    if any('"' in str(path) or "\n" in str(path) for path in (key, known)):
        raise RouteError(f"ssh cannot be told of paths such as {known}: set TPU_RELAY_HOME to a plain path")
    options = {
        "IdentityFile": f'"{key}"',
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": f'"{known}"',
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "PreferredAuthentications": "publickey",
        "ServerAliveInterval": "15",
        "LogLevel": "ERROR",
    }
    return [
        "ssh",
        "-F",
        "none",
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
    ]


def _proxy(words: Sequence[str]) -> list[str]:
    # ssh fills in %h and the like, and hands the rest to a shell.
    return ["-o", "ProxyCommand=" + shlex.join(words).replace("%", "%%")]


async def profile_run(connection: Connection, run_dir: str, steps: int, report: Callable[[str], None]) -> str:
    """Trace the next `steps` steps on host 0; returns the trace's folder in the bucket once it is there.

    Raises:
        HostNotReady: the run does not train now.
        ProfileFailed: the program does not look for requests, or ended before the trace was done.
        tpu.hosts.errors.HostUnreachable: host 0 cannot be reached.
    """
    record, fence, events = await asyncio.gather(
        asyncio.to_thread(load_record, run_dir),
        asyncio.to_thread(load_fence, run_dir),
        asyncio.to_thread(load_events, run_dir),
    )
    name = record.config.name
    if not record.config.commits:
        raise ProfileFailed(
            f"{name} runs a command that does not use the segment contract: it cannot be asked"
        )
    slices = {e.detail["attempt"]: e.detail["slice"] for e in events if e.kind == "attempt-started"}
    if not fence.open or fence.attempt not in slices:
        raise HostNotReady(f"{name} does not train now; `relay show {name}` tells more")
    taken = slices[fence.attempt]
    hosts = await _addresses(connection, record, taken, candidate_of(events, taken).zone)
    target = f"{run_dir}/profiles/{fence.attempt}"
    before = await asyncio.to_thread(finished_traces, target)
    identity = ensure_identity(connection.home)
    async with connect_all(hosts[:1], identity, connection, CONNECT_S, report) as group:
        request = f"~/{GangSpec(name, fence.attempt).folder}/{REQUEST}"
        await group.put(json.dumps({"steps": steps}).encode(), request)
        report(f"asked attempt {fence.attempt} of {name} to trace {steps} steps")
        waiting = _Waiting(run_dir, fence.attempt, group.members[0], request)
        await waiting.until_taken_up(report)
        return await waiting.until_there(target, before)


class _Waiting:
    """The wait for a trace of one attempt, as long as that attempt is open."""

    def __init__(self, run_dir: str, attempt: int, host: HostConnection, request: str) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._host = host
        self._request = request

    async def until_taken_up(self, report: Callable[[str], None]) -> None:
        try:
            async with asyncio.timeout(TAKEN_UP_S):
                while (await self._host.run(f"test -e {self._request}")).exit_code == 0:
                    await self._still_open()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            await self._host.run(f"rm -f {self._request}")
            raise ProfileFailed(
                f"the program did not take the request up in {TAKEN_UP_S:.0f} s: a loop of your own needs "
                "tpu.train.profile.Profiler around its calls"
            ) from None
        report("the trace has begun")

    async def until_there(self, target: str, before: set[str]) -> str:
        try:
            async with asyncio.timeout(TRACE_S):
                while True:
                    # First the attempt, then the bucket: what an attempt wrote before it ended is seen.
                    is_open = await self._is_open()
                    if fresh := await asyncio.to_thread(finished_traces, target) - before:
                        return min(fresh)
                    if not is_open:
                        break
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ProfileFailed(
                f"no trace came into {target} in {TRACE_S:.0f} s; its steps may be slow"
            ) from None
        raise ProfileFailed(
            f"attempt {self._attempt} ended before the trace was done; ask again with fewer steps"
        )

    async def _still_open(self) -> None:
        if not await self._is_open():
            raise ProfileFailed(f"attempt {self._attempt} ended before it began the trace; ask its successor")

    async def _is_open(self) -> bool:
        fence = await asyncio.to_thread(load_fence, self._run_dir)
        return fence.open and fence.attempt == self._attempt


def finished_traces(target: str) -> set[str]:
    """Folders of the whole traces below `target`: the .xplane.pb file is the last that is written."""
    found = (re.match(r"(.*/host-\d+)/.*\.xplane\.pb$", url) for url in files.names(target))
    return {match[1] for match in found if match}
