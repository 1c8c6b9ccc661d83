"""The first process of an emulated TPU VM: starts the SSH server and the startup-script, adopts and reaps.

It is to its host what init is to a machine. The SSH server is a process of its own, so that it can be killed
while the user's processes live on, as children of this one. The emulator is at the other end of the control
socket; when that closes, in whatever way, the host ends with all its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from tpu.emulator import chips, sshd
from tpu.emulator.host_spec import Machine, process_environment
from tpu.emulator.processes import adopt_orphans, kill_all, marked_processes

SSH_RESTART_S = 1.0  # as systemd's RestartSec would have it: long enough for a client to notice


def main(control: socket.socket) -> NoReturn:
    """Be the host whose Machine comes, as one line of JSON, over the control socket."""
    os.setsid()
    adopt_orphans()
    control.sendall(b"h")  # a sign of life
    machine = Machine.from_json(_read_line(control))
    try:
        Init(machine, control).run()
    except (
        Exception
    ) as error:  # the emulator must learn why, whatever it is: this process has no other way to say so
        with contextlib.suppress(OSError):
            _send(control, {"event": "failed", "error": f"{type(error).__name__}: {error}"})
    finally:
        # A forked copy must not run the forkserver's own exit handlers.
        os._exit(0)


class Init:
    """The loop of a host. It blocks in one `select` and has no threads, so it may fork."""

    def __init__(self, machine: Machine, control: socket.socket) -> None:
        self._machine = machine
        self._control = control
        self._sshd = 0
        self._restart_at: float | None = None

    def run(self) -> None:
        """Serve until the emulator closes the control socket, then end every process of this host."""
        spec = self._machine.spec
        os.sched_setaffinity(0, spec.cpus)
        os.chdir(spec.home)
        # Read and write end of the same pair: a signal wakes the select below.
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        _send(self._control, {"event": "init", "pid": os.getpid()})
        self._start_sshd()
        self._run_startup_script()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(self._seconds_to_restart()):
                    if key.fileobj is wake:
                        with contextlib.suppress(BlockingIOError):
                            wake.recv(4096)
                    elif not self._obey(self._control.recv(64)):
                        self._end_all()
                        return
                self._reap()

    def _start_sshd(self) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            sshd.main(self._machine, self._control, parent)
        self._sshd, self._restart_at = pid, None
        _send(self._control, {"event": "sshd", "pid": pid})

    def _seconds_to_restart(self) -> float | None:
        return None if self._restart_at is None else max(0.0, self._restart_at - time.monotonic())

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._sshd:
                self._sshd, self._restart_at = 0, time.monotonic() + SSH_RESTART_S
                _send(self._control, {"event": "sshd", "pid": 0})
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._start_sshd()

    def _obey(self, commands: bytes) -> bool:
        """Carry out commands of one letter each; False at the end of the control socket."""
        for command in commands:
            if command == ord("b"):
                locks = self._machine.chip_locks
                self._spawn(
                    [sys.executable, "-I", "-S", chips.__file__, str(locks)], self._machine.folder / "busy"
                )
        return bool(commands)

    def _run_startup_script(self) -> None:
        text = self._machine.spec.attributes.get("startup-script")
        if not text:
            return
        script = self._machine.folder / "startup-script"
        script.write_text(text)
        script.chmod(0o700)
        command = [str(script)] if text.startswith("#!") else ["/bin/bash", str(script)]
        log = self._machine.folder / "startup-script.log"
        try:
            self._spawn(command, log)
        except OSError as error:  # a wrong interpreter line: the real unit reports success as well
            log.write_text(f"startup-script could not be started: {error}\n")

    def _spawn(self, command: list[str], output: Path) -> None:
        with output.open("wb") as file:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self._machine.spec.home,
                env=process_environment(self._machine),
                start_new_session=True,
            )

    def _end_all(self) -> None:
        own = os.getpid()
        kill_all(lambda: [p for p in marked_processes(self._machine.marker, [own]) if p.pid != own])


def _read_line(control: socket.socket) -> bytes:
    """Read up to the newline. Nothing is sent behind it before the host has answered."""
    data = bytearray()
    while not data.endswith(b"\n"):
        part = control.recv(65536)
        if not part:
            os._exit(0)  # the emulator has gone
        data += part
    return bytes(data)


def _send(control: socket.socket, message: dict[str, str | int]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")
