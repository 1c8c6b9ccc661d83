"""The runs of a simulated fleet: one-chip trainings whose progress is arithmetic between events.

A run that starts on a host trains from the moment it is started there until it is finished or the host stops. What it
keeps of that is its last checkpoint's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

from tpu.emulator.simulation_hosts import ScriptedHost

HOUR = 3600.0
# Sums and differences of seconds are not exact: late in a week a run would wake a moment before its end.
INEXACT_S = 1e-3


@dataclass(frozen=True)
class Work:
    """How runs behave, in seconds: from the connection to the first step, and between two checkpoints.

    With `hears_notice` a run has saved its state `save_s` after it was told that its host is preempted.
    """

    start_s: float = 45.0
    checkpoint_s: float = 300.0
    save_s: float = 5.0
    hears_notice: bool = True


@dataclass(frozen=True)
class Stay:
    """One stay of a run on a chip: when it held the chip, and what of the time in it is kept in checkpoints."""

    run: str
    node: str
    begin: float
    end: float
    kept_s: float


@dataclass
class Run:
    """One training of `length_s` seconds of steps; `done_s` of them are in its newest checkpoint."""

    name: str
    length_s: float
    done_s: float = 0.0
    finished: float | None = None
    stays: list[Stay] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.length_s - self.done_s

    def keep(self, stay: Stay) -> bool:
        """Add what was trained in a stay; True if that was the last of it."""
        self.done_s += stay.kept_s
        self.stays.append(stay)
        return self.left_s < INEXACT_S


def make_runs(count: int, median_s: float, luck: Random) -> list[Run]:
    """Runs of lognormal lengths, at most three times the median: most are short, a few take days."""
    lengths = [median_s * min(3.0, math.exp(luck.gauss(0, 0.7))) for _ in range(count)]
    return [Run(f"trial-{number:04}", length) for number, length in enumerate(lengths)]


def trained_s(host: ScriptedHost, since: float, now: float) -> float:
    """Seconds of steps that a run which took its first step at `since` has done by now, at most."""
    stops = [at for at in (host.hung_at, host.dead_at, now) if at is not None]
    return max(0.0, min(stops) - since)


def kept_s(run: Run, host: ScriptedHost, since: float, now: float, work: Work) -> float:
    """Seconds of these steps that are in a checkpoint: all if it is finished or has saved itself in time."""
    trained = min(trained_s(host, since, now), run.left_s)
    if trained >= run.left_s - INEXACT_S:
        return run.left_s
    kept = math.floor(trained / work.checkpoint_s) * work.checkpoint_s
    noticed = host.noticed_at
    if work.hears_notice and noticed is not None and noticed > since and host.hung_at is None:
        at_notice = trained_s(host, since, noticed)
        if trained >= at_notice + work.save_s:
            kept = max(kept, at_notice)
    return kept
