"""What stands behind the served API: a clock, a fleet of hosts, and the weather if they are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpu.clock import Clock
from tpu.emulator import zones
from tpu.emulator.host_fleet import HostFleet
from tpu.emulator.nodes import Nodes
from tpu.emulator.simulation_clock import ScaledClock
from tpu.emulator.simulation_hosts import ScriptedFleet
from tpu.emulator.simulation_weather import TYPICAL, History
from tpu.emulator.state import World


@dataclass(frozen=True)
class Stage:
    """`begin` lets things happen by themselves, at the start and after each reset."""

    clock: Clock
    fleet: HostFleet
    begin: Callable[[Nodes], None] = lambda nodes: None


def scripted_stage(world: World, speed: float, seed: int) -> Stage:
    """Scripted hosts in typical weather, on a clock that runs `speed` times as fast as ours."""
    clock = ScaledClock(speed)
    history = History(clock)
    fleet = ScriptedFleet(world, clock, TYPICAL.hosts, seed, history)

    def begin(nodes: Nodes) -> None:
        fleet.attach(nodes)
        for zone in zones.GENERATIONS:
            for kind in zones.accelerator_types(zone):
                world.background.start(fleet.stockouts((zone, kind), TYPICAL.places))

    return Stage(clock, fleet, begin)
