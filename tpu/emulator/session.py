"""One command, shell or file transfer over SSH on an emulated host."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import termios
from contextlib import suppress
from pathlib import Path
from typing import cast

import asyncssh

_CHUNK = 65536


class CommandSession(asyncssh.SSHServerProcess[bytes]):
    """Runs what the client asks for through `/bin/bash -c` in a session of its own; SFTP and scp as well.

    The command's pipes are pumped by hand, a chunk at a time with `drain` behind it: asyncssh's own
    redirection broke connections at 50 MB.
    """

    def __init__(self, environment: dict[str, str], home: Path) -> None:
        super().__init__(_run, self._files, sftp_version=3, allow_scp=True)
        self.environment = environment
        self.home = home
        self.group: int | None = None  # pid of the command, and of its session and process group
        self.terminal: int | None = None

    def _files(self, channel: object) -> HomeFiles:
        return HomeFiles(cast(asyncssh.SSHServerChannel[bytes], channel), self.home)

    def signal_received(self, signal: str) -> None:
        """Pass a signal on at once, even while input waits to be read."""
        self.send_signal(signal)

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self.terminal is not None:
            _set_size(self.terminal, width, height)

    def send_signal(self, name: str) -> None:
        number = getattr(signal, f"SIG{name}", None)
        if self.group is not None and number is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.group, number)


class HomeFiles(asyncssh.SFTPServer):
    """Files as OpenSSH serves them: relative paths and `~/` are below the home folder."""

    def __init__(self, channel: asyncssh.SSHServerChannel[bytes], home: Path) -> None:
        super().__init__(channel)
        self._session = channel
        self._home = os.fsencode(home)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._home, path.removeprefix(b"~/"))

    def exit(self) -> None:
        """Say that all went well: OpenSSH's scp fails at the end of a transfer whose exit code it does not hear."""
        with suppress(OSError):
            self._session.exit(0)


async def _run(session: asyncssh.SSHServerProcess[bytes]) -> None:
    assert isinstance(session, CommandSession)
    if session.subsystem is not None:
        session.stderr.write(b"no such subsystem\n")
        session.exit(127)
        return
    environment = dict(session.environment)
    # OpenSSH's AcceptEnv of Debian and Ubuntu.
    for name, value in session.env.items():
        key = name.decode() if isinstance(name, bytes) else name
        if key == "LANG" or key.startswith("LC_"):
            environment[key] = value.decode() if isinstance(value, bytes) else value
    command = ["/bin/bash", "-c", session.command] if session.command is not None else ["/bin/bash", "-l"]
    try:
        if session.term_type:
            await _run_on_terminal(session, command, {**environment, "TERM": session.term_type})
        else:
            await _run_on_pipes(session, command, environment)
    except OSError as error:  # no more processes or memory; the client must not wait for ever
        session.stderr.write(f"cannot start {command[0]}: {error}\n".encode())
        session.exit(126)


async def _run_on_pipes(session: CommandSession, command: list[str], environment: dict[str, str]) -> None:
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin[0],
            stdout=stdout[1],
            stderr=stderr[1],
            cwd=session.home,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        for end in (stdin[1], stdout[0], stderr[0]):
            os.close(end)
        raise
    finally:
        for end in (stdin[0], stdout[1], stderr[1]):
            os.close(end)
    session.group = process.pid
    feeding = asyncio.create_task(_feed(session.stdin, stdin[1]))
    await asyncio.gather(
        _copy_out(stdout[0], session.stdout), _copy_out(stderr[0], session.stderr), process.wait()
    )
    feeding.cancel()
    with suppress(asyncio.CancelledError):
        await feeding
    session.group = None
    _report_exit(session, process.returncode)


async def _run_on_terminal(session: CommandSession, command: list[str], environment: dict[str, str]) -> None:
    master, slave = os.openpty()
    session.terminal = master
    width, height, _, _ = session.term_size
    _set_size(master, width, height)
    try:
        process = await asyncio.create_subprocess_exec(
            *_on_controlling_terminal(command),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=session.home,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        os.close(master)
        raise
    finally:
        os.close(slave)
    session.group = process.pid
    feeding = asyncio.create_task(_feed(session.stdin, os.dup(master)))
    await _copy_out(master, session.stdout)
    session.terminal = None
    feeding.cancel()
    with suppress(asyncio.CancelledError):
        await feeding
    session.send_signal("HUP")  # as a hang-up does; nothing where the command has ended by itself
    await process.wait()
    session.group = None
    _report_exit(session, process.returncode)


def _on_controlling_terminal(command: list[str]) -> list[str]:
    # A session leader gets a controlling terminal by opening one; `script`-like helpers are not everywhere.
    return ["/bin/bash", "-c", 'exec <"$(tty)" && exec "$@"', "bash", *command]


async def _copy_out(pipe: int, writer: asyncssh.SSHWriter[bytes]) -> None:
    """Copy the pipe to the client until its end, or until the client has gone; then close the pipe, so that
    the command gets SIGPIPE if it writes on."""
    reader = asyncio.StreamReader(limit=_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    except (OSError, asyncssh.Error):
        return  # the client has gone; or the terminal, whose end is an EIO
    finally:
        transport.close()


async def _feed(reader: asyncssh.SSHReader[bytes], pipe: int) -> None:
    """Copy what the client sends to the pipe, then close it: at the client's end of file or its departure."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(pipe, "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        while True:
            try:
                chunk = await reader.read(_CHUNK)
            except asyncssh.BreakReceived:
                continue
            if not chunk:
                return
            writer.write(chunk)
            await writer.drain()
    except (OSError, asyncssh.Error):
        return  # the command reads no more, or the connection broke
    finally:
        transport.close()


def _report_exit(session: CommandSession, code: int | None) -> None:
    with suppress(OSError, asyncssh.Error):
        if code is not None and code < 0:
            session.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            session.exit(code or 0)


def _set_size(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
