"""What a driver and its parts work with: the run, the right to act for it, and the ways to cloud, hosts and bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpu.clock import Clock
from tpu.cloud import TpuCloud
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import connect_all
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import Identity
from tpu.runs import launch
from tpu.runs.code import Bundle
from tpu.runs.event_log import EventLog
from tpu.runs.membership import Membership
from tpu.runs.record import RunRecord
from tpu.runs.tenure import Tenure
from tpu.slices.monitor import Monitor
from tpu.slices.project_memory import ProjectMemory, memory_of_bucket
from tpu.slices.request import SliceRequest


@dataclass(frozen=True)
class RunContext:
    """Of one driver, from the moment when it may act for the run until it leaves. `code` is the program's."""

    record: RunRecord
    run_dir: str
    log: EventLog
    tenure: Tenure
    member: Membership
    cloud: TpuCloud
    monitor: Monitor
    connection: Connection
    identity: Identity
    code: Bundle
    clock: Clock
    report: Callable[[str], None]

    @cached_property
    def memory(self) -> ProjectMemory:
        """What all runs of the project remember of its zones."""
        return memory_of_bucket(self.connection.bucket, self.clock)

    def connect(
        self, hosts: Sequence[HostAddress], within_s: float
    ) -> contextlib.AbstractAsyncContextManager[HostGroup]:
        """Connections to these hosts. Raises HostUnreachable if one cannot be had within `within_s`."""
        return connect_all(hosts, self.identity, self.connection, within_s, self.report)

    @property
    def request(self) -> SliceRequest:
        """What all candidates of the run have in common."""
        return launch.slice_request(self.record.config, self.connection, self.identity)
