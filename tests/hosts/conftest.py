"""Emulated slices to connect to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tpu.clock import SystemClock
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import connect_all
from tpu.hosts.gang import GangSpec
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import Identity, ensure_identity
from tpu.slices.provision import provision
from tpu.slices.request import SliceRequest


@dataclass(frozen=True)
class Slice:
    """A ready slice, and all that is needed to get onto it."""

    emulator: Emulator
    connection: Connection
    identity: Identity
    hosts: tuple[HostAddress, ...]

    @property
    def name(self) -> str:
        return self.hosts[0].slice

    def connect(self, deadline_s: float = 20.0) -> contextlib.AbstractAsyncContextManager[HostGroup]:
        return connect_all(self.hosts, self.identity, self.connection, deadline_s, lambda _: None)

    def gang(self, program: str, attempt: int = 1, run: str = "r", **more: object) -> GangSpec:
        """A gang that runs a shell script on every host; W is the number of the host."""
        environments = {host: {"W": str(host.index)} for host in self.hosts}
        argv = ["/bin/bash", "-c", program]
        return GangSpec(run, attempt, argv=argv, environments=environments, **more)  # type: ignore[arg-type]


async def _made(emulator: Emulator, accelerator: str) -> Slice:
    connection = Connection.from_environment()
    identity = ensure_identity(connection.home)
    request = SliceRequest(
        zone="us-central2-b",
        accelerator_type=accelerator,
        metadata={"ssh-keys": f"{connection.ssh_user}:{identity.public_line}"},
        deadline_s=60,
    )

    async def wanted() -> None:
        pass

    async with open_cloud(connection) as cloud:
        ready = await provision(cloud, request, "pair", SystemClock(), lambda _: None, wanted)
    return Slice(emulator, connection, identity, ready.hosts)


@pytest.fixture
async def pair(emulator: Emulator) -> Slice:
    """A ready v4-16: two hosts."""
    return await _made(emulator, "v4-16")


async def eventually(true: Callable[[], object], what: str, within_s: float = 15.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)
