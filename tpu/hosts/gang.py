"""Start, follow and end the processes of one attempt on all hosts of a group.

The supervisor on each host does the work; this asks all of them at once. A gang lives apart from every
connection: what is started here goes on when this process dies, and is found again by run and attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpu.hosts.address import HostAddress
from tpu.hosts.errors import CommandFailed, GangStartFailed, HostUnreachable
from tpu.hosts.group import Completed, HostConnection, HostGroup
from tpu.runtime import supervisor
from tpu.runtime.environment import STALE_VARIABLES

__all__ = [
    "Beat",
    "Cleared",
    "Ended",
    "Event",
    "Exit",
    "GangSpec",
    "GangStartFailed",
    "HostSignal",
    "HostStatus",
    "Log",
    "Lost",
    "Notice",
    "Tenant",
    "clear_chips",
    "end_gang",
    "end_hosts",
    "follow_gang",
    "gang_status",
    "start_gang",
]

# A supervisor beats each 2 s; so many are missed before a host that says nothing is given up.
SILENCE_S = 15.0
START_S = 90.0
STATUS_S = 30.0
# Beyond the grace: killing, the log's last part, and the confirmation.
END_MARGIN_S = 45.0
# Ending what earlier tenants left, one after the other.
CLEAR_S = 120.0
QUEUE_SIGNALS = 1000
NOT_INSTALLED = 94
# Below the home folder of each host.
RELAY_FOLDER = ".relay"


@dataclass(frozen=True)
class Tenant:
    """By which lease a gang has chips, the same ones on each host: hosts refuse a lower `term` than they have seen."""

    term: int
    chips: tuple[int, ...]


@dataclass(frozen=True)
class GangSpec:
    """What runs. Only `run` and `attempt` matter for following, asking and ending.

    In `argv`, `cwd` and the environments, ${HOME} and ${RELAY_ATTEMPT_DIR} stand for the host's own paths.
    `files` (name to text) are written into the attempt's folder. `log_target` is a gs:// folder, or "" for none.
    `grace_s` is the time between the preemption notice's SIGTERM and SIGKILL. Without a `tenant` nobody else uses
    the hosts.
    """

    run: str
    attempt: int
    argv: Sequence[str] = ()
    environments: Mapping[HostAddress, Mapping[str, str]] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    log_target: str = ""
    secrets: Sequence[str] = field(default=(), repr=False)
    grace_s: float = 25.0
    cwd: str | None = None
    metadata: str | None = None
    upload_every_s: float = 10.0
    tenant: Tenant | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run) or self.attempt < 0:
            raise ValueError(
                f"a gang has a run's name and an attempt from 0 up, found {self.run!r}, {self.attempt}"
            )
        if any(
            len(s) >= supervisor.SHORTEST_SECRET and s in word for s in self.secrets for word in self.argv
        ):
            raise ValueError(
                "a secret stands in the command line, where every user of the host can read it: "
                "let the program take it from its environment"
            )

    @property
    def folder(self) -> str:
        """The attempt's folder on a host, below the home folder."""
        return f"{RELAY_FOLDER}/runs/{self.run}/{self.attempt}"


@dataclass(frozen=True)
class Log:
    """A line of the program's output; `offset` is where the next one begins, in bytes."""

    host: HostAddress
    line: str
    offset: int


@dataclass(frozen=True)
class Event:
    """What the program said of itself; `offset` is where the next record begins, in bytes."""

    host: HostAddress
    record: dict[str, Any]
    offset: int


@dataclass(frozen=True)
class Beat:
    """The host answers and its program runs."""

    host: HostAddress


@dataclass(frozen=True)
class Notice:
    """The host is about to be preempted; its program was told with SIGTERM."""

    host: HostAddress
    source: str


@dataclass(frozen=True)
class Exit:
    """The program has ended, by itself (`code`) or by a signal; `reason` is set if it could not be started."""

    host: HostAddress
    code: int | None
    signal: int | None
    reason: str | None = None


@dataclass(frozen=True)
class Lost:
    """Nothing more comes from this host. `final`: the host itself says so; else only the connection is gone."""

    host: HostAddress
    reason: str
    final: bool = False


HostSignal = Log | Event | Beat | Notice | Exit | Lost


@dataclass(frozen=True)
class HostStatus:
    """`lost`: the supervisor died without an exit code. `unknown`: the host did not answer, see `reason`.

    `ended` is True if we ended the attempt there, but not if the program had exited by itself before.
    """

    host: HostAddress
    state: Literal["running", "exited", "lost", "absent", "unknown"]
    exit: Exit | None = None
    notice: Notice | None = None
    ended: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Cleared:
    """Whether chips of a host are free for a new tenant: `ended` are the attempts, RUN/NUMBER, that were ended there.

    `trouble` is None if all is well: nothing of earlier tenants lives and nobody holds the chips.
    """

    host: HostAddress
    ended: tuple[str, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True)
class Ended:
    """On which hosts every process of the attempt is confirmed gone, and why not on the others."""

    confirmed: tuple[HostAddress, ...]
    unconfirmed: Mapping[HostAddress, str]


async def start_gang(group: HostGroup, spec: GangSpec) -> None:
    """Start the gang on all hosts at once. Started already, it is left alone.

    If this is cancelled, parts may run: end the gang.

    Raises:
        GangStartFailed: a host did not start its part; all others were ended again.
        ValueError: a host of the group has no environment in `spec`.
    """
    if missing := [host.name for host in group.hosts if host not in spec.environments]:
        raise ValueError(f"no environment is given for {', '.join(missing)}")

    async def start(member: HostConnection) -> str | None:
        wanted = json.dumps(_specification(member.host, spec)).encode()
        done = await _supervise(member, "start", spec.folder, wanted, START_S)
        if done.exit_code == 0:
            return None
        said = _answer(done)
        return said.get("error") or f"exit code {done.exit_code}: {done.stderr.strip()[-500:]}"

    reasons: dict[str, str] = {}
    for host, said in zip(group.hosts, await group.try_each(start), strict=True):
        if isinstance(said, HostUnreachable):
            reasons.update(said.reasons)
        elif said is not None:
            reasons[host.name] = said
    if reasons:
        ended = await end_hosts(group, spec, 0.0)
        raise GangStartFailed(reasons, {host.name: reason for host, reason in ended.unconfirmed.items()})


async def follow_gang(
    group: HostGroup,
    spec: GangSpec,
    offsets: Mapping[HostAddress, tuple[int, int]] | None = None,
    silence_s: float = SILENCE_S,
) -> AsyncGenerator[HostSignal, None]:
    """What all hosts say, from `offsets` (log, events; in bytes) on, until each has said Exit or Lost.

    To go on after a Lost that is not final, connect again and pass the offsets of the last Log and Event.
    """
    signals: asyncio.Queue[HostSignal] = asyncio.Queue(QUEUE_SIGNALS)
    tasks = [
        asyncio.create_task(
            _follow_host(member, spec, (offsets or {}).get(member.host, (0, 0)), silence_s, signals)
        )
        for member in group.members
    ]
    try:
        left = len(tasks)
        while left:
            signal = await signals.get()
            yield signal
            left -= isinstance(signal, Exit | Lost)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gang_status(group: HostGroup, spec: GangSpec) -> list[HostStatus]:
    """What each host knows of the attempt; a host that does not answer is `unknown`."""
    said = await group.try_each(lambda member: _supervise(member, "status", spec.folder, None, STATUS_S))
    return [_status(host, one) for host, one in zip(group.hosts, said, strict=True)]


async def end_gang(group: HostGroup, spec: GangSpec, grace_s: float) -> bool:
    """End the gang on all hosts; True once every process of it is confirmed gone on every one."""
    return not (await end_hosts(group, spec, grace_s)).unconfirmed


async def end_hosts(group: HostGroup, spec: GangSpec, grace_s: float) -> Ended:
    """SIGTERM, after `grace_s` SIGKILL, then confirm, on all hosts at once; says where that worked.

    What has been ended is never started again, also where it had not been started yet.
    """
    said = await group.try_each(
        lambda member: _supervise(
            member, "end", spec.folder, None, grace_s + END_MARGIN_S, f"--grace {grace_s:g}"
        )
    )
    confirmed: list[HostAddress] = []
    unconfirmed: dict[HostAddress, str] = {}
    for host, one in zip(group.hosts, said, strict=True):
        if isinstance(one, HostUnreachable):
            unconfirmed[host] = one.reasons.get(host.name, str(one))
        elif _answer(one).get("confirmed"):
            confirmed.append(host)
        else:
            left = _answer(one).get("left")
            unconfirmed[host] = (
                f"processes are left: {left}" if left else one.stderr.strip()[-500:] or "no answer"
            )
    return Ended(tuple(confirmed), unconfirmed)


async def clear_chips(group: HostGroup, tenant: Tenant) -> list[Cleared]:
    """Make chips of all hosts free for a new tenant: what earlier ones left is ended, and can start no more.

    A host that does not answer is one in trouble.
    """
    options = f"--term {tenant.term} --chips {','.join(map(str, tenant.chips))}"
    said = await group.try_each(
        lambda member: _supervise(member, "clear", RELAY_FOLDER, None, CLEAR_S, options)
    )
    return [_cleared(host, one) for host, one in zip(group.hosts, said, strict=True)]


def _cleared(host: HostAddress, said: Completed | HostUnreachable) -> Cleared:
    if isinstance(said, HostUnreachable):
        return Cleared(host, trouble=said.reasons.get(host.name, str(said)))
    known = _answer(said)
    trouble = known.get("error") or known.get("busy") or None
    if known.get("left"):
        trouble = f"processes cannot be ended: {known['left']}"
    elif trouble is None and not (known.get("confirmed") and known.get("free")):
        trouble = said.stderr.strip()[-500:] or "no answer"
    return Cleared(host, tuple(known.get("ended", ())), trouble)


async def _follow_host(
    member: HostConnection,
    spec: GangSpec,
    offsets: tuple[int, int],
    silence_s: float,
    signals: asyncio.Queue[HostSignal],
) -> None:
    """Put signals of one host until an Exit or Lost, which is always the last one."""
    loop, host, said = asyncio.get_running_loop(), member.host, "the stream ended"
    command = _command("follow", spec.folder, f"--log-offset {offsets[0]} --event-offset {offsets[1]}")
    try:
        await _install(member)
        async with (
            asyncio.timeout(silence_s) as silence,
            contextlib.aclosing(member.stream(command)) as lines,
        ):
            async for line in lines:
                signal = _signal(host, line)
                # The time in which the reader is busy is not the host's silence.
                silence.reschedule(None)
                if signal is None:
                    said = line.strip() or said
                else:
                    await signals.put(signal)
                if isinstance(signal, Exit | Lost):
                    return
                silence.reschedule(loop.time() + silence_s)
        reason = said
    except TimeoutError:
        reason = f"silent for {silence_s:g} s"
    except HostUnreachable as error:
        reason = error.reasons.get(host.name, str(error))
    except CommandFailed as error:
        reason = f"{said} ({error})"
    await signals.put(Lost(host, reason))


def _signal(host: HostAddress, line: str) -> HostSignal | None:
    """What a line of the supervisor's stream means; None if it is none of its own."""
    try:
        said = json.loads(line)
        match said["k"]:
            case "log":
                return Log(host, said["line"], said["o"])
            case "event":
                return Event(host, said["record"], said["o"])
            case "beat":
                return Beat(host)
            case "notice":
                return Notice(host, said["source"])
            case "exit":
                return Exit(host, said["code"], said["signal"], said["reason"])
            case "lost":
                return Lost(host, said["reason"], final=True)
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _status(host: HostAddress, said: Completed | HostUnreachable) -> HostStatus:
    if isinstance(said, HostUnreachable):
        return HostStatus(host, "unknown", reason=said.reasons.get(host.name, str(said)))
    known = _answer(said)
    if known.get("state") not in ("running", "exited", "lost", "absent"):
        return HostStatus(host, "unknown", reason=said.stderr.strip()[-500:] or "no answer")
    ended, notice = known["exit"], known["notice"]
    return HostStatus(
        host,
        known["state"],
        Exit(host, ended["code"], ended["signal"], ended["reason"]) if ended else None,
        Notice(host, notice["source"]) if notice else None,
        known["ended"],
    )


def _specification(host: HostAddress, spec: GangSpec) -> dict[str, Any]:
    """What the supervisor of one host reads from its stdin."""
    return {
        "host": host.name,
        "argv": list(spec.argv),
        "env": dict(spec.environments[host]),
        "unset": list(STALE_VARIABLES),
        "files": dict(spec.files),
        "cwd": spec.cwd,
        "log_target": spec.log_target,
        "secrets": list(spec.secrets),
        "grace_s": spec.grace_s,
        "metadata": spec.metadata,
        "upload_every_s": spec.upload_every_s,
        "tenant": {"term": spec.tenant.term, "chips": list(spec.tenant.chips)} if spec.tenant else None,
    }


def _answer(done: Completed) -> dict[str, Any]:
    """The last line of a supervisor's answer; empty if it is not one."""
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return said if isinstance(said, dict) else {}
    except (ValueError, IndexError):
        return {}


def _source() -> tuple[str, bytes]:
    """Name on the host and text of the supervisor: another version never replaces one that runs."""
    text = Path(supervisor.__file__).read_bytes()
    return f"{RELAY_FOLDER}/supervisor-{hashlib.sha256(text).hexdigest()[:12]}.py", text


def _command(verb: str, folder: str, options: str = "") -> str:
    file = f'"$HOME/{_source()[0]}"'
    run = f'exec python3 -I -S {file} {verb} "$HOME/{folder}" {options}'
    return f"[ -f {file} ] || exit {NOT_INSTALLED}; {run}"


async def _supervise(
    member: HostConnection,
    verb: str,
    folder: str,
    stdin: bytes | None,
    timeout_s: float,
    options: str = "",
) -> Completed:
    """Run a command of the supervisor, which is installed if the host does not have it yet."""
    command = _command(verb, folder, options)
    done = await member.run(command, stdin, timeout_s)
    if done.exit_code == NOT_INSTALLED:
        await _install(member)
        done = await member.run(command, stdin, timeout_s)
    return done


async def _install(member: HostConnection) -> None:
    name, text = _source()
    if (await member.run(f'[ -f "$HOME/{name}" ]')).exit_code != 0:
        await member.put(text, f"~/{name}")
