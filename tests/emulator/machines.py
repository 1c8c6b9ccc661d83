"""Emulated hosts without the API in front of them, and a real SSH client for them."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import asyncssh

from tpu.emulator.addresses import AddressPool
from tpu.emulator.host_pool import EmulatedHost, HostPool, HostSpec

USER = "relay"


@dataclass
class Room:
    """A pool, a key that its hosts admit, and addresses for them."""

    pool: HostPool
    addresses: AddressPool
    folder: Path
    emulator_id: str
    key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))

    def spec(self, node: str = "slice-a", index: int = 0, **changes: object) -> HostSpec:
        spec = HostSpec(
            node=node,
            zone="us-central2-b",
            project="emulated-project",
            index=index,
            address=self.addresses.take(),
            ssh_port=2222,
            metadata_port=8081,
            accelerator_type="v4-8",
            chips=4,
            devices_per_chip=1,
            threads=1,
            cpus=(min(os.sched_getaffinity(0)),),
            home=self.folder / "homes" / f"{node}-{index}",
            attributes={"ssh-keys": key_line(self.key)},
            environment={},
            preemptible=True,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]

    async def boot(self, node: str = "slice-a", index: int = 0, **changes: object) -> EmulatedHost:
        return await self.pool.boot(self.spec(node, index, **changes))

    def connect(self, host: EmulatedHost, key: asyncssh.SSHKey | None = None, user: str = USER):
        return connect(host, key or self.key, user)


@asynccontextmanager
async def room(folder: Path) -> AsyncIterator[Room]:
    emulator_id = f"test-{uuid.uuid4().hex[:8]}"
    pool, addresses = HostPool(emulator_id, folder / "state"), AddressPool.claim()
    await pool.start()
    try:
        yield Room(pool, addresses, folder, emulator_id)
    finally:
        await pool.stop()
        addresses.close()


def connect(host: EmulatedHost, key: asyncssh.SSHKey, user: str = USER):
    """An asyncssh client that trusts the host's published key alone."""
    return asyncssh.connect(
        host.spec.address,
        host.spec.ssh_port,
        username=user,
        client_keys=[key],
        known_hosts=pinned(host, host.host_key_public),
        config=None,
        agent_path=None,
    )


def pinned(host: EmulatedHost, public: str):
    return asyncssh.import_known_hosts(f"[{host.spec.address}]:{host.spec.ssh_port} {public}\n")


def key_line(key: asyncssh.SSHKey, user: str = USER) -> str:
    return f"{user}:{key.export_public_key().decode().strip()} {user}"


def state(pid: int) -> str:
    """The letter of /proc/PID/stat, X for a process that is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        if loop.time() > deadline:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        await asyncio.sleep(0.02)
