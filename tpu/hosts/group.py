"""Open connections to hosts, used together: run a command everywhere at once, copy a file, stream lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import asyncssh

from tpu.hosts.address import HostAddress
from tpu.hosts.errors import CommandFailed, HostUnreachable

CLOSE_S = 2.0
CHUNK_BYTES = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True)
class Completed:
    """How a command ended on one host. `exit_code` is minus the signal's number if one ended it."""

    host: HostAddress
    exit_code: int
    stdout: str
    stderr: str


class HostConnection:
    """One host that is connected to. Every method raises HostUnreachable when the connection breaks."""

    def __init__(self, host: HostAddress, ssh: asyncssh.SSHClientConnection) -> None:
        self.host = host
        self._ssh = ssh

    async def run(self, command: str, stdin: bytes | None = None, timeout_s: float = 60.0) -> Completed:
        """Run a shell command and wait for its end.

        Raises:
            HostUnreachable: the connection broke, or there was no end within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._ssh.create_process(command, encoding=None)
                try:
                    (out, err), _ = await asyncio.gather(
                        process.communicate(), _feed(process.stdin, stdin or b"")
                    )
                    await process.wait_closed()
                finally:
                    process.close()
        except TimeoutError:
            raise self._unreachable(f"no end within {timeout_s:.0f} s of: {command[:80]}") from None
        except (asyncssh.Error, OSError) as error:
            raise self._unreachable(describe_error(error)) from error
        if process.returncode is None:
            raise self._unreachable("the connection broke while a command ran")
        return Completed(self.host, process.returncode, _text(out), _text(err))

    async def put(self, data: bytes | Path, remote_path: str, mode: int = 0o600) -> None:
        """Store a file on the host, as a whole or not at all. A relative path or ~/… is in the home folder.

        Raises:
            HostUnreachable: the connection broke, or the host refused (the reason says which).
        """
        path = PurePosixPath(remote_path.removeprefix("~/"))
        part = f"{path}.{secrets.token_hex(6)}.part"
        try:
            async with self._ssh.start_sftp_client() as sftp:
                await sftp.makedirs(str(path.parent), exist_ok=True)
                if isinstance(data, Path):
                    await sftp.put(str(data), part)
                else:
                    async with sftp.open(part, "wb") as file:
                        await file.write(data)
                await sftp.chmod(part, mode)
                await sftp.posix_rename(part, str(path))
        except (asyncssh.Error, OSError) as error:
            raise self._unreachable(f"cannot store {remote_path}: {describe_error(error)}") from error

    async def stream(self, command: str) -> AsyncGenerator[str, None]:
        """The lines that a command prints (to stdout and stderr), as they come.

        Raises:
            HostUnreachable: the connection broke.
            CommandFailed: the command ended with another code than 0.
        """
        pending = b""
        try:
            # Joined on the host: two streams of a channel arrive in no order.
            process = await self._ssh.create_process(
                f"exec 2>&1\n{command}", encoding=None, stdin=asyncssh.DEVNULL
            )
            try:
                while chunk := await process.stdout.read(CHUNK_BYTES):
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        yield _text(line)
                await process.wait_closed()
            finally:
                process.close()
        except (asyncssh.Error, OSError) as error:
            raise self._unreachable(describe_error(error)) from error
        if pending:
            yield _text(pending)
        if process.returncode is None:
            raise self._unreachable("the connection broke while a command ran")
        if process.returncode != 0:
            raise CommandFailed(f"{self.host.name}: exit code {process.returncode} of: {command[:80]}")

    async def close(self) -> None:
        """Close politely, but never wait long for a host that does not answer."""
        self._ssh.close()
        with contextlib.suppress(TimeoutError, asyncssh.Error, OSError):
            async with asyncio.timeout(CLOSE_S):
                await self._ssh.wait_closed()
        self._ssh.abort()

    def _unreachable(self, reason: str) -> HostUnreachable:
        return HostUnreachable({self.host.name: reason})


class HostGroup:
    """Connections to some hosts, in the order in which they were asked for."""

    def __init__(self, members: Sequence[HostConnection]) -> None:
        self.members = tuple(members)

    @property
    def hosts(self) -> tuple[HostAddress, ...]:
        return tuple(member.host for member in self.members)

    async def run(self, command: str, stdin: bytes | None = None, timeout_s: float = 60.0) -> list[Completed]:
        """Run a command on all hosts at once; the order is that of `hosts`.

        Raises:
            HostUnreachable: names every host whose connection broke or that gave no answer in time.
        """
        return await self.each(lambda member: member.run(command, stdin, timeout_s))

    async def put(self, data: bytes | Path, remote_path: str, mode: int = 0o600) -> None:
        """Store a file on all hosts at once.

        Raises:
            HostUnreachable: names every host that did not take it.
        """
        await self.each(lambda member: member.put(data, remote_path, mode))

    async def each(self, action: Callable[[HostConnection], Awaitable[T]]) -> list[T]:
        """Do something with every host at once, wait for all of them, and name all that were unreachable."""
        done = await self.try_each(action)
        reasons = {k: v for one in done if isinstance(one, HostUnreachable) for k, v in one.reasons.items()}
        if reasons:
            raise HostUnreachable(reasons)
        return [one for one in done if not isinstance(one, HostUnreachable)]

    async def try_each(self, action: Callable[[HostConnection], Awaitable[T]]) -> list[T | HostUnreachable]:
        """Like `each`, with the error in the place of an unreachable host's answer."""

        async def attempt(member: HostConnection) -> T | HostUnreachable:
            try:
                return await action(member)
            except HostUnreachable as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(attempt(member)) for member in self.members]
        return [task.result() for task in started]

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))


async def _feed(stdin: asyncssh.SSHWriter[bytes], data: bytes) -> None:
    """Write a command's input. A command that ends without reading it says by its exit code whether that is bad."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        stdin.write_eof()
        await stdin.drain()


def describe_error(error: BaseException) -> str:
    """One sentence for a person."""
    if isinstance(error, asyncssh.Error):
        return error.reason or type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""
