"""What a simulated fleet really did, as the cloud saw it: chip-hours held and used, dollars, leaks, calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.bench.fleet_runs import HOUR, Run, Stay
from tpu.emulator.simulation import Simulation
from tpu.slices.candidate import Candidate

AUDIT_EVERY_S = 60.0
# A dead slice must be on its way out of the cloud so long after it died.
CLEARED_WITHIN_S = 600.0
_DEAD = frozenset({"PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED"})


@dataclass(frozen=True)
class Held:
    """A slice that cost money from `begin` to `end`, simulated seconds."""

    node: str
    begin: float
    end: float


def held_by(events: Iterable[tuple[float, str]], now: float) -> list[Held]:
    """From the cloud's history: every time that a slice's hosts were up."""
    up: dict[str, float] = {}
    found: list[Held] = []
    for at, what in events:
        kind, _, name = what.partition(" ")
        if kind == "boot":
            up[name] = at
        elif kind == "down" and name in up:
            found.append(Held(_short(name), up.pop(name), at))
    return found + [Held(_short(name), begin, now) for name, begin in up.items()]


def idle_s(held: Iterable[Held], stays: Iterable[Stay]) -> float:
    """Slice-seconds held while nobody was on the slice."""
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for stay in stays:
        busy[stay.node].append((stay.begin, stay.end))
    total = 0.0
    for one in held:
        at = one.begin
        for begin, end in sorted(busy[one.node]):
            if end <= at or begin >= one.end:
                continue
            total += max(0.0, begin - at)
            at = min(end, one.end)
        total += one.end - at
    return total


class Audit:
    """Looks into the cloud every minute for slices that nobody knows of, or that died and are not being deleted."""

    def __init__(self, simulation: Simulation, known: Callable[[str, str], Awaitable[bool]]) -> None:
        """`known(zone, name)`: whether somebody will care for this slice."""
        self._simulation = simulation
        self._known = known
        self._dead_since: dict[object, float] = {}
        self.leaked_s = 0.0
        self.leaks: dict[str, float] = defaultdict(float)

    async def run(self) -> None:
        while True:
            await self._simulation.clock.sleep(AUDIT_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        now, world = self._simulation.clock.monotonic(), self._simulation.world
        there = [(q, q.location.zone, q.queued_id, q.state, q.ask.slices) for q in world.queued.values()]
        there += [(n, n.location.zone, n.node_id, n.state, 1) for n in world.nodes.values() if not n.queued]
        dead_since: dict[object, float] = {}
        for record, zone, name, state, count in there:
            if state == "DELETING":
                continue
            forgotten = False
            if state in _DEAD:
                dead_since[record] = self._dead_since.get(record, now)
                forgotten = now - dead_since[record] >= CLEARED_WITHIN_S
            if forgotten or not await self._known(zone, name):
                self.leaked_s += count * AUDIT_EVERY_S
                self.leaks[f"{name} in {zone} ({state})"] += AUDIT_EVERY_S
        self._dead_since = dead_since


def figures(
    simulation: Simulation, runs: list[Run], candidates: Mapping[str, Candidate], chips: int, audit: Audit
) -> dict[str, Any]:
    """The figures of one controller's week; `candidates` says what each slice was, by its name."""
    now = simulation.clock.monotonic()
    held = held_by(simulation.history.events, now)
    stays = [stay for run in runs for stay in run.stays]
    held_s = sum(one.end - one.begin for one in held)
    kept_s = sum(stay.kept_s for stay in stays)
    shares = [run.length_s / sum(s.end - s.begin for s in run.stays) for run in runs if run.finished]
    ends = [run.finished for run in runs if run.finished]
    dollars = sum((one.end - one.begin) / HOUR * price(candidates[one.node]) for one in held)
    calls = simulation.calls.a_minute()
    return {
        "goodput": round(kept_s / (held_s * chips), 4),
        "goodput_of_a_run": round(sum(shares) / max(1, len(shares)), 4),
        "runs_finished": len(ends),
        "runs": len(runs),
        "last_finished_h": round(max(ends, default=0.0) / HOUR, 1),
        "productive_chip_hours": round(kept_s / HOUR, 1),
        "slice_hours": round(held_s / HOUR, 1),
        "idle_slice_hours": round(idle_s(held, stays) / HOUR, 1),
        "leaked_slice_hours": round(audit.leaked_s / HOUR, 3),
        "leaks": dict(sorted(audit.leaks.items())[:5]),
        "left_in_cloud": len(simulation.world.queued) + len(simulation.world.nodes),
        "dollars": round(dollars),
        "dollars_a_productive_chip_hour": round(dollars / max(1e-9, kept_s / HOUR), 3),
        "happened": dict(simulation.history.counts),
        "calls_a_minute": {k: {"most": c.most, "mean": round(c.mean, 2)} for k, c in calls.items()},
        "cpu_s": {k: round(v, 1) for k, v in sorted(simulation.cpu_s.items())},
    }


def price(candidate: Candidate) -> float:
    return candidate.price_an_hour or 0.0


def _short(name: str) -> str:
    return name.rpartition("/")[2]
