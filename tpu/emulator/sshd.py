"""The SSH server of one emulated host. It behaves as OpenSSH does where a program could tell the difference:

keys are read from a file at each login, a command runs in its own session and outlives the connection, and
its channel stays open until everybody who holds its output has closed it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import asyncssh

from tpu.emulator.host_spec import Machine, process_environment
from tpu.emulator.processes import die_with_parent
from tpu.emulator.session import CommandSession

LOGIN_TIMEOUT_S = 30


def main(machine: Machine, control: socket.socket, parent: int) -> NoReturn:
    """Serve until killed. Writes one line to `control` when it listens, or when it could not."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        logging.basicConfig(filename=machine.folder / "sshd.log", level=logging.INFO)
        asyncio.run(_serve(machine, control))
    except Exception as error:  # reported whatever it is: the emulator waits for a line
        message = {"event": "failed", "error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            control.sendall(json.dumps(message).encode() + b"\n")
    finally:
        os._exit(1)


async def _serve(machine: Machine, control: socket.socket) -> None:
    spec = machine.spec
    key = _host_key(machine.folder / "ssh_host_ed25519_key")
    await asyncssh.listen(
        spec.address,
        spec.ssh_port,
        server_factory=lambda: HostServer(machine),
        server_host_keys=[key],
        encoding=None,
        config=None,
        line_editor=False,
        login_timeout=LOGIN_TIMEOUT_S,
        server_version="Emulated_TPU_VM",
    )
    public = key.export_public_key().decode().strip()
    control.sendall(json.dumps({"event": "listening", "key": public}).encode() + b"\n")
    control.close()
    await asyncio.Event().wait()


def _host_key(path: Path) -> asyncssh.SSHKey:
    """Return the key of this host, made at its first start: it stays when the server is restarted."""
    if path.exists():
        return asyncssh.read_private_key(path)
    key = asyncssh.generate_private_key("ssh-ed25519")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.export_private_key())
    return key


class HostServer(asyncssh.SSHServer):
    """Who may log in, and what a connection may ask for."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._user = ""

    def begin_auth(self, username: str) -> bool:
        self._user = username
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        lines = self._machine.authorized_keys.read_text()
        return key.public_data in admitted_keys(lines, username)

    def session_requested(self) -> asyncssh.SSHServerProcess[bytes]:
        environment = process_environment(self._machine, self._user)
        return CommandSession(environment, self._machine.spec.home)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        """Forward to other hosts, as a jump host does; nothing leaves the machine."""
        if dest_host == "localhost":
            return True
        try:
            return ipaddress.ip_address(dest_host).is_loopback
        except ValueError:
            return False


def admitted_keys(lines: str, username: str) -> set[bytes]:
    """Return the public keys with which `username` may log in, from lines `user:type base64 comment`.

    A line that cannot be read admits nobody; it does not shut out the others.
    """
    admitted: set[bytes] = set()
    for line in lines.splitlines():
        user, separator, text = line.strip().partition(":")
        if not separator or user != username:
            continue
        try:
            admitted.add(asyncssh.import_public_key(" ".join(text.split()[:2])).public_data)
        except asyncssh.KeyImportError:
            sys.stderr.write(f"unreadable key of {user} in ssh-keys\n")
    return admitted
