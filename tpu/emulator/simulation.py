"""A simulated fleet: the emulated Cloud TPU with scripted hosts, on virtual time, in the caller's process.

World, service, capacity, queued resources and operations are the emulator's own; only hosts, time and fate are
replaced. `Simulation.cloud` is the product's own client of the API over them. Thousands of slices run for simulated
days in minutes.

    async def story(simulation: Simulation) -> int:
        await simulation.cloud.create_queued_resource(...)
        await simulation.clock.sleep(3600)
        ...
    found = simulate(story, seed=1, weather=Weather(...))
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from tpu.clock import Clock
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import GoogleTpuCloud
from tpu.emulator.capacity import Limits, Where
from tpu.emulator.dispatch import Dispatcher
from tpu.emulator.faults import Faults
from tpu.emulator.nodes import Nodes
from tpu.emulator.operations import OperationStore
from tpu.emulator.queued import QueuedResources
from tpu.emulator.simulation_client import CallCounts, SimulatedClient
from tpu.emulator.simulation_clock import VirtualClock, VirtualTimeLoop, context_of, run_virtual
from tpu.emulator.simulation_hosts import ScriptedFleet
from tpu.emulator.simulation_weather import History, Weather, stream
from tpu.emulator.state import NodeRecord, World
from tpu.emulator.tpu_service import TpuService

Result = TypeVar("Result")
PROJECT = "simulated"
_KEY = "simulated"

# A heap with thousands of slices is walked far more often than is worth it with Python's own thresholds: half of all
# time went into that.
_SELDOM = (50_000, 20, 50)


class Simulation:
    """One simulated cloud. `cloud` is how controllers see it; the rest is for those who stage and judge it."""

    def __init__(self, seed: int, weather: Weather, limits: Limits, policy: CallPolicy | None = None) -> None:
        self.clock: Clock = VirtualClock()
        self.history = History(self.clock)
        self.world = World(stream(seed, "ids"))
        self.world.settings = replace(self.world.settings, limits=limits, delete_delay_s=20.0)
        self.fleet = ScriptedFleet(self.world, self.clock, weather.hosts, seed, self.history)
        self.nodes = Nodes(self.world, self.fleet, self.clock)
        self.fleet.attach(self.nodes)
        queued = QueuedResources(self.world, self.nodes, self.clock)
        operations = OperationStore(self.clock, self.world.background, stream(seed, "operations"))
        service = TpuService(PROJECT, self.world, self.nodes, queued, operations, self.clock)
        self.faults = Faults()
        client: Any = SimulatedClient(
            Dispatcher(service, operations, self.faults, _KEY),
            _KEY, self.clock, weather.calls, stream(seed, "calls"),
        )  # fmt: skip
        self.calls: CallCounts = client.counts
        self.cloud = GoogleTpuCloud(
            client, PROJECT, (), self.clock, policy or CallPolicy(), chance=stream(seed, "pauses")
        )
        self._seed = seed
        self._weather = weather

    def let_stockouts_come(self, places: Iterable[Where]) -> None:
        """Begin the stockouts of these places, by the weather."""
        for where in places:
            coming = self.fleet.stockouts(where, self._weather.places)
            context_of("cloud").run(self.world.background.start, coming)

    def node(self, zone: str, name: str) -> NodeRecord | None:
        """What stands behind a node's name; None if the cloud knows none."""
        return self.world.nodes.get(f"projects/{PROJECT}/locations/{zone}/nodes/{name}")

    @property
    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU so far, by account: `controller`, `cloud`, and whatever else ACCOUNT was set to."""
        loop = asyncio.get_running_loop()
        return loop.cpu_s() if isinstance(loop, VirtualTimeLoop) else {}


def simulate(
    story: Callable[[Simulation], Awaitable[Result]],
    *,
    seed: int,
    weather: Weather | None = None,
    limits: Limits | None = None,
    policy: CallPolicy | None = None,
) -> Result:
    """Run `story` in a simulated cloud of its own, and return what it returns.

    Two runs of a seed give the same history.
    """

    async def run() -> Result:
        simulation = Simulation(seed, weather or Weather(), limits or Limits(), policy)
        try:
            return await story(simulation)
        finally:
            await simulation.world.background.cancel_all()

    thresholds = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        return run_virtual(run())
    finally:
        gc.set_threshold(*thresholds)
