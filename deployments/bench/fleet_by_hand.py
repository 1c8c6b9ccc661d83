"""The peer in a simulated fleet: the loops that people script.

One loop a slice, always in the same zone: create, poll by get until it is active, run, poll the node; when it is
gone, delete it and create it again at once. It is kinder than most: each chip takes a run of its own, a dropped
connection gives the run back to the queue at once, and a slice goes as soon as there is nothing left to run. It has no
time-out for a silent host: somebody looks once in a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from deployments.bench.fleet_runs import HOUR, Run, Stay, Work, kept_s
from tpu.clock import sleep_unless
from tpu.cloud import CloudError, ErrorKind, NodeState, QueuedResourceRequest, QueuedResourceState
from tpu.emulator.simulation import Simulation
from tpu.emulator.simulation_clock import account
from tpu.emulator.simulation_hosts import ScriptedHost
from tpu.slices.candidate import Candidate
from tpu.slices.intent import node_request
from tpu.slices.request import SliceRequest
from tpu.topology import accelerator_type

_ENDED = (QueuedResourceState.FAILED, QueuedResourceState.SUSPENDING, QueuedResourceState.SUSPENDED)


@dataclass(frozen=True)
class Habits:
    """How such scripts are written: seconds between two polls, and until somebody notices a host that hangs."""

    poll_s: float = 30.0
    notice_hang_s: float = 12 * HOUR


class ByHand:
    """All loops, and their one queue of runs."""

    def __init__(
        self,
        simulation: Simulation,
        slices: Sequence[Candidate],
        runs: Sequence[Run],
        work: Work,
        habits: Habits | None = None,
    ) -> None:
        self._cloud = simulation.cloud
        self._clock = simulation.clock
        self._simulation = simulation
        self._slices = {f"tpu-{number}": candidate for number, candidate in enumerate(slices)}
        self._queue = deque(runs)
        self._unfinished = len(runs)
        self._work = work
        self._habits = habits or Habits()

    async def run(self) -> None:
        """Let all loops run until all runs are finished."""
        async with asyncio.TaskGroup() as group:
            for name, candidate in self._slices.items():
                group.create_task(self._loop(name, candidate))

    async def known(self, zone: str, name: str) -> bool:
        return name in self._slices and self._slices[name].zone == zone

    async def candidates(self) -> dict[str, Candidate]:
        return dict(self._slices)

    async def _loop(self, name: str, candidate: Candidate) -> None:
        request = SliceRequest(candidate.zone, candidate.accelerator_type, candidate.provisioning)
        wanted = QueuedResourceRequest(node_request(name, request))
        while self._unfinished and self._queue:
            with contextlib.suppress(CloudError):  # it will be asked for again
                await self._cloud.create_queued_resource(candidate.zone, name, wanted)
                if await self._active(name, candidate.zone):
                    await self._use(name, candidate)
            await self._delete(name, candidate.zone)

    async def _active(self, name: str, zone: str) -> bool:
        while True:
            await self._clock.sleep(self._habits.poll_s)
            found = await self._cloud.get_queued_resource(zone, name)
            if found.state in _ENDED:
                return False
            if found.state is QueuedResourceState.ACTIVE:
                return True

    async def _use(self, name: str, candidate: Candidate) -> None:
        """Run what is in the queue on all chips, until the node is gone or the queue is empty."""
        node = self._simulation.node(candidate.zone, name)
        if node is None or not node.hosts:
            return
        host = cast(ScriptedHost, node.hosts[0])
        chips = accelerator_type(candidate.accelerator_type).chips
        workers = [account("runs", self._work_off(name, host)) for _ in range(chips)]
        while not all(worker.done() for worker in workers):
            await self._clock.sleep(self._habits.poll_s)
            try:
                if (await self._cloud.get_node(candidate.zone, name)).state is not NodeState.READY:
                    break
            except CloudError as error:
                if error.kind is ErrorKind.NOT_FOUND:
                    break
        await asyncio.gather(*workers)

    async def _work_off(self, name: str, host: ScriptedHost) -> None:
        while host.works and self._queue:
            run = self._queue.popleft()
            begin = self._clock.monotonic()
            first_step = begin + host.ssh_s + self._work.start_s
            stopped = asyncio.Event()
            host.on_stop.append(stopped.set)
            try:
                await sleep_unless(self._clock, first_step + run.left_s - begin, stopped)
                kept = kept_s(run, host, first_step, self._clock.monotonic(), self._work)
                if host.hung_at is not None and host.dead_at is None:
                    stopped.clear()
                    await sleep_unless(self._clock, self._habits.notice_hang_s, stopped)
            except asyncio.CancelledError:  # the time of the simulation is over
                kept = kept_s(run, host, first_step, self._clock.monotonic(), self._work)
                run.keep(Stay(run.name, name, begin, self._clock.monotonic(), kept))
                raise
            host.on_stop.remove(stopped.set)
            if run.keep(Stay(run.name, name, begin, self._clock.monotonic(), kept)):
                run.finished = self._clock.monotonic()
                self._unfinished -= 1
            else:
                self._queue.append(run)

    async def _delete(self, name: str, zone: str) -> None:
        """Delete it and wait until it is gone: its name is wanted again."""
        while True:
            with contextlib.suppress(CloudError):
                await self._cloud.delete_queued_resource(zone, name)
            try:
                await self._cloud.get_queued_resource(zone, name)
            except CloudError as error:
                if error.kind is ErrorKind.NOT_FOUND:
                    return
            await self._clock.sleep(self._habits.poll_s)
