"""Reach into a run that trains: log in to its hosts, ask its trainer for a profile."""

from __future__ import annotations

import json

from tpu.checkpoint.fence import load_fence
from tpu.connection import Connection
from tpu.cloud.google import open_cloud
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import connect_all
from tpu.hosts.gang import GangSpec
from tpu.hosts.identity import ensure_identity
from tpu.runs.event_log import load_events
from tpu.runs.record import RunRecord, load_record
from tpu.slices.hosts import host_addresses
from tpu.topology import accelerator_type

CONNECT_S = 20.0


class HostNotReady(RuntimeError):
    """The run has no slice whose hosts can be reached; the message says what it has."""


async def hosts_of(connection: Connection, run_dir: str) -> tuple[HostAddress, ...]:
    """Hosts of the slice that the run's newest attempt trains on.

    Raises:
        HostNotReady: there is no such slice now.
        tpu.runs.record.RunNotFound: there is no such run.
    """
    record = load_record(run_dir)
    events = load_events(run_dir)
    started = [e.detail for e in events if e.kind == "attempt-started"]
    ended = {e.detail["attempt"] for e in events if e.kind == "attempt-ended"}
    if not started or started[-1]["attempt"] in ended:
        raise HostNotReady(
            f"{record.config.name} does not train now: `relay show {record.config.name}` tells more"
        )
    return await _addresses(connection, record, started[-1]["slice"])


async def _addresses(connection: Connection, record: RunRecord, name: str) -> tuple[HostAddress, ...]:
    async with open_cloud(connection) as cloud:
        node = await cloud.get_node(record.config.slice.zone, name)
        return await host_addresses(cloud, record.config.slice.zone, node)
