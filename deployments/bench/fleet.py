"""A simulated week of a fleet, ours beside what people script; then how the controller grows with the fleet.

The cloud is the emulator's own, with scripted hosts and on virtual time: see tpu.emulator.simulation. Stockouts come
and go in four zones, spot slices live for six hours on average, hosts boot slowly and hang, calls fail now and then.

Ours: the product's keeper with its monitor, leases, zone health and creation rate, and its `assign` for the runs. The
keeper is killed every 11 hours. Peer: a loop a slice (fleet_by_hand.py), on the same seed and the same runs.

`goodput` is the time of steps that are in a checkpoint over the time that chips were held. `leaked_slice_hours` are
those of slices in the cloud that no lease stands for, and of dead ones that nobody deletes. CPU is told apart: the
controller's, the simulated cloud's, that of handing out chips (`runs`). Calls do not include the work of gRPC itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deployments.bench.fleet_by_hand import ByHand
from deployments.bench.fleet_judge import Audit, figures
from deployments.bench.fleet_pool import LIST_EVERY_S, Book, PoolController, Queue
from deployments.bench.fleet_runs import HOUR, Run, Work, make_runs
from deployments.bench.fleet_scale import assign_ms, measure
from deployments.bench.lab import BenchFailed, machine, parser, say, tell
from tpu.emulator.capacity import Limits
from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_clock import account
from tpu.emulator.simulation_weather import TYPICAL, Weather, stream
from tpu.slices.candidate import Candidate
from tpu.slices.pool_size import Option
from tpu.topology import accelerator_type

KIND = "v6e-4"
ZONES = ("us-east1-d", "us-east5-a", "us-east5-b", "europe-west4-a")
# US dollars an hour for four chips; what matters is that spot is much cheaper.
ON_DEMAND = Candidate(ZONES[1], KIND, "on-demand", 10.80)
SPOT = tuple(Candidate(zone, KIND, "spot", 4.32) for zone in ZONES)
PLACES = [(zone, KIND) for zone in ZONES]


@dataclass(frozen=True)
class Week:
    """One fleet and its queue; `spot_a_zone` is the capacity and quota of each zone for spot slices."""

    steady: int = 10
    spot: int = 100
    spot_a_zone: int = 40
    runs: int = 2000
    median_run_s: float = 20 * HOUR
    hours: float = 168.0
    keeper_killed_every_s: float | None = 11 * HOUR
    weather: Weather = TYPICAL
    seed: int = 1

    @property
    def limits(self) -> Limits:
        a_zone = dict.fromkeys(PLACES, self.spot_a_zone + self.steady)
        return Limits(capacity=a_zone, quota=a_zone)

    @property
    def options(self) -> list[Option]:
        return [Option(ON_DEMAND, self.steady), *(Option(spot, self.spot_a_zone) for spot in SPOT)]

    @property
    def slices(self) -> list[Candidate]:
        """As somebody would spread them by hand."""
        return [ON_DEMAND] * self.steady + [SPOT[n % len(SPOT)] for n in range(self.spot)]

    def make_runs(self) -> list[Run]:
        return make_runs(self.runs, self.median_run_s, stream(self.seed, "runs"))


SHORT = Week(
    steady=2,
    spot=10,
    spot_a_zone=4,
    runs=60,
    median_run_s=4 * HOUR,
    hours=24.0,
    keeper_killed_every_s=5 * HOUR,
)


class Controller(Protocol):
    """What keeps slices and trains runs on them."""

    async def run(self) -> None: ...
    async def known(self, zone: str, name: str) -> bool: ...
    async def candidates(self) -> dict[str, Candidate]: ...


async def play(
    simulation: Simulation, controller: Controller, runs: list[Run], hours: float
) -> dict[str, Any]:
    """Let a controller work until it is done, for so many hours at most, and judge it."""
    simulation.let_stockouts_come(PLACES)
    audit = Audit(simulation, controller.known)
    auditing = account("bench", audit.run())
    working = asyncio.create_task(controller.run())
    await asyncio.wait([auditing, working], timeout=hours * HOUR, return_when=asyncio.FIRST_COMPLETED)
    for task in (auditing, working):
        if task.done():
            task.result()
        task.cancel()
    await asyncio.wait([auditing, working], timeout=60)
    chips = accelerator_type(KIND).chips
    found = figures(simulation, runs, await controller.candidates(), chips, audit)
    return found | {"hours": round(simulation.clock.monotonic() / HOUR, 1)}


def our_week(week: Week) -> dict[str, Any]:
    runs = week.make_runs()

    async def story(simulation: Simulation) -> dict[str, Any]:
        async def serve(book: Book, unfinished: Callable[[int], None]) -> None:
            candidates = [option.candidate for option in week.options]
            await Queue(simulation, book, candidates, runs, Work(), unfinished).serve()

        controller = PoolController(
            simulation, week.options, week.steady + week.spot, week.keeper_killed_every_s, Book(), serve
        )
        found = await play(simulation, controller, runs, week.hours)
        return found | {
            "bucket_asked": dict(controller.book.asked),
            "keeper_killed": controller.keepers.kills,
        }

    return simulate(story, seed=week.seed, weather=week.weather, limits=week.limits)


def week_by_hand(week: Week) -> dict[str, Any]:
    runs = week.make_runs()

    async def story(simulation: Simulation) -> dict[str, Any]:
        controller = ByHand(simulation, week.slices, runs, Work(hears_notice=False))
        return await play(simulation, controller, runs, week.hours)

    return simulate(story, seed=week.seed, weather=week.weather, limits=week.limits)


def scale(size: int, hours: float, seed: int) -> dict[str, Any]:
    """What a fleet of this size costs its controller; what the cloud alone holds in memory is taken off."""
    say(f"{size} slices for {hours:g} simulated hours")
    alone = _in_a_process(size, 0.0, seed)
    found = _in_a_process(size, hours, seed)
    counted = _in_a_process(size, hours / 4, seed, "--count")
    memory_kb = 1000 * (found.pop("rss_mb") - alone["rss_mb"]) / size
    return found | {"controller_memory_kb_a_slice": round(memory_kb, 1)} | counted


def _in_a_process(size: int, hours: float, seed: int, *more: str) -> dict[str, Any]:
    """Measure in a process of its own, whose memory tells of nothing else."""
    command = [
        sys.executable,
        "-m",
        "deployments.bench.fleet",
        "--hold",
        str(size),
        str(hours),
        str(seed),
        *more,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"holding {size} slices ended with {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def growth(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, float]:
    """By how much more a slice costs in the large fleet: 1 is linear growth.

    Seconds grow faster than calls where the large fleet no longer fits into the caches of the processor.
    """
    names = (
        "controller_cpu_ms_a_slice", "controller_calls_a_slice", "controller_memory_kb_a_slice",
        "lists_a_minute_and_zone",
    )  # fmt: skip
    return {name: round(large[name] / small[name], 2) for name in names}


def main() -> None:
    arguments = parser("fleet", __doc__)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--hold", nargs=3, metavar=("SLICES", "HOURS", "SEED"), help=argparse.SUPPRESS)
    arguments.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.hold:
        size, hours, seed = int(chosen.hold[0]), float(chosen.hold[1]), int(chosen.hold[2])
        print(json.dumps(measure(size, SPOT, TYPICAL, seed, hours, chosen.count)))
        return
    about, began = machine(), time.monotonic()
    week = replace(SHORT if chosen.short else Week(), seed=chosen.seed)
    say(f"{week.hours:g} simulated hours of {week.steady + week.spot} slices and {week.runs} runs: ours")
    ours = our_week(week)
    say("the same, as people script it")
    peer = week_by_hand(week)
    sizes, hours = ((50, 200), 0.25) if chosen.short else ((1000, 10000), 2.0)
    scales = [scale(size, hours, chosen.seed) for size in sizes]
    waiting = {str(size): assign_ms(size, SPOT) for size in sizes}
    tell(
        {
            "bench": "fleet",
            "ratio": round(ours["goodput"] / peer["goodput"], 3),
            "leaked_slice_hours": ours["leaked_slice_hours"],
            "goodput": ours["goodput"],
            "ours": ours,
            "peer": peer,
            "scale": scales,
            "growth": growth(*scales),
            "assign_ms": waiting,
            "list_every_s": LIST_EVERY_S,
            "creations_allowed_a_minute": Limits().creations_per_minute,
            "seed": chosen.seed,
            "took_s": round(time.monotonic() - began),
            "machine": about,
        }
    )


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))
