"""What a fleet costs its controller, by its size: CPU, memory and calls of two simulated hours.

The fleet is there when the keeper begins, as after a restart; it then sees each slice die every six hours on average
and makes another one. The process is this fleet's own: its memory tells of nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from deployments.bench.fleet_pool import POOL, Book, Keepers
from tpu.cloud import CloudError, QueuedResourceRequest
from tpu.emulator.capacity import Limits
from tpu.emulator.simulation import Simulation, simulate
from tpu.emulator.simulation_clock import ACCOUNT, account
from tpu.emulator.simulation_weather import Weather
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.intent import node_request
from tpu.slices.labels import ownership_labels
from tpu.slices.pool import Wanted, assign
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_size import Option
from tpu.slices.request import SliceRequest
from tpu.topology import accelerator_type

BOOTED_S = 1200.0
_AT_ONCE = 50
_KEEPER = "keeper"


def measure(
    size: int,
    candidates: Sequence[Candidate],
    weather: Weather,
    seed: int,
    hours: float,
    counting: bool = False,
) -> dict[str, Any]:
    """Hold a fleet of this size for so many simulated hours; 0 for the memory of the cloud alone.

    With `counting` the function calls of the controller are counted, Python's and C's: unlike seconds they do not
    depend on how quickly the machine's memory answers. Counting takes time itself, so no seconds are told then.
    """

    async def story(simulation: Simulation) -> dict[str, Any]:
        calls = Counter[str]()
        return await _hold(simulation, size, candidates, hours, calls if counting else None)

    return simulate(story, seed=seed, weather=weather, limits=Limits(creations_per_minute=10**6))


async def _hold(
    simulation: Simulation,
    size: int,
    candidates: Sequence[Candidate],
    hours: float,
    function_calls: Counter[str] | None,
) -> dict[str, Any]:
    first = candidates[0]
    request = SliceRequest(first.zone, first.accelerator_type, labels=ownership_labels(POOL, _KEEPER))
    book = Book()
    await account("bench", _fill(simulation, book if hours else None, size, candidates, request))
    limits = replace(simulation.world.settings.limits, creations_per_minute=Limits().creations_per_minute)
    simulation.world.settings = replace(simulation.world.settings, limits=limits)
    if not hours:
        return {"rss_mb": rss_mb()}
    simulation.let_stockouts_come([(candidate.zone, candidate.accelerator_type) for candidate in candidates])
    keepers = Keepers(simulation, book, [Option(candidate) for candidate in candidates], request)
    keepers.want(size)
    cpu, began, asked = simulation.cpu_s, simulation.clock.monotonic(), book.asked.copy()
    process, boots = time.process_time(), simulation.history.counts["boot"]
    if function_calls is not None:
        sys.setprofile(_count(function_calls))
    keeping = asyncio.create_task(keepers.run())
    ready: list[int] = []
    while simulation.clock.monotonic() - began < hours * 3600:
        await asyncio.wait([keeping], timeout=60)
        ready.append(sum(node.state == "READY" for node in simulation.world.nodes.values()))
    sys.setprofile(None)
    if keeping.done():
        keeping.result()
    if function_calls is not None:
        return {"controller_calls_a_slice": round(function_calls["controller"] / size, 1)}
    spent = {name: seconds - cpu.get(name, 0.0) for name, seconds in simulation.cpu_s.items()}
    controller = spent.get("controller", 0.0)
    calls = simulation.calls.a_minute(began)
    lists = simulation.calls.lists_a_minute(began)
    return {
        "slices": size,
        "simulated_hours": hours,
        "rss_mb": rss_mb(),
        "controller_cpu_s": round(controller, 1),
        "controller_cpu_ms_a_slice": round(1000 * controller / size, 2),
        "share_of_a_core": round(controller / (hours * 3600), 4),
        "cloud_cpu_s": round(spent.get("cloud", 0.0), 1),
        "all_cpu_s": round(time.process_time() - process, 1),
        "ready_mean": round(sum(ready) / len(ready)),
        "made_anew": simulation.history.counts["boot"] - boots,
        "lists_a_minute_and_zone": max(one.mean for one in lists.values()),
        "calls_a_minute": {k: {"most": c.most, "mean": round(c.mean, 2)} for k, c in calls.items()},
        "bucket_asked_a_minute": {
            name: round((count - asked[name]) / (hours * 60), 1) for name, count in book.asked.items()
        },
    }


def _count(calls: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    """Return a profiler that counts function calls by the account on which they are made."""

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[ACCOUNT.get()] += 1

    return count


async def _fill(
    simulation: Simulation,
    book: Book | None,
    size: int,
    candidates: Sequence[Candidate],
    request: SliceRequest,
) -> None:
    """Make the fleet that is there at the start, with its leases if there is a book for them."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def make(number: int) -> None:
        candidate = candidates[number % len(candidates)]
        name = f"relay-fleet-{number:05}"
        node = node_request(name, request.of(candidate))
        made = False
        while not made:
            async with gate:
                with contextlib.suppress(CloudError):  # the simulated API fails now and then
                    wanted = QueuedResourceRequest(node)
                    await simulation.cloud.create_queued_resource(candidate.zone, name, wanted)
                    made = True
        if book is not None:
            chips = accelerator_type(candidate.accelerator_type).chips
            now = simulation.clock.time()
            lease = leases.intend(name, POOL, candidate, chips, _KEEPER, now)
            kept = await book.create(lease)
            lease = leases.ready(leases.admit(lease, kept.generation), now)
            await book.change(lease, kept.generation)

    await asyncio.gather(*(make(number) for number in range(size)))
    await simulation.clock.sleep(BOOTED_S)


def assign_ms(size: int, candidates: Sequence[Candidate]) -> float:
    """Milliseconds of one decision for as many waiting one-chip runs as there are slices, one in ten of them free."""
    fleet = []
    for number in range(size):
        candidate = candidates[number % len(candidates)]
        chips = accelerator_type(candidate.accelerator_type).chips
        lease = leases.ready(leases.intend(f"slice-{number}", POOL, candidate, chips, _KEEPER, 0.0), 0.0)
        if number % 10:
            holder = leases.Holder(f"run-{number}", f"run-{number}", lease.all_chips)
            lease = leases.take(lease, holder, 0.0)
        fleet.append(lease)
    waiting = [Wanted(f"w-{n}", f"w-{n}", tuple(candidates), chips=1, since=float(n)) for n in range(size)]
    began = time.process_time()
    assign(waiting, fleet, PoolSettings(max_slices=size))
    return round(1000 * (time.process_time() - began), 1)


def rss_mb() -> float:
    """Memory of this process that is in use now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
