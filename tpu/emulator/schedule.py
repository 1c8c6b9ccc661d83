"""Preemptions by a seeded plan: the same seed gives the same waits and the same choices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Notice = Literal["never", "always", "alternate"]


@dataclass(frozen=True)
class Schedule:
    """Preempt one spot node after each exponential wait of `mean_s` seconds, `count` times at most."""

    seed: int
    mean_s: float
    notice: Notice = "never"
    count: int | None = None

    def __post_init__(self) -> None:
        if self.mean_s <= 0:
            raise ValueError(f"mean_s must be more than 0 seconds, found {self.mean_s}")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count must be 1 or more, or None for no end, found {self.count}")


@dataclass(frozen=True)
class Strike:
    """One planned preemption: wait so long, then strike the node at this fraction of the sorted list."""

    wait_s: float
    choice: float  # in [0, 1)
    notice: bool

    def pick(self, candidates: Sequence[str]) -> str | None:
        """Return whom it strikes, independent of the order in which candidates are given; None if none."""
        ordered = sorted(candidates)
        return ordered[int(self.choice * len(ordered))] if ordered else None


def strikes(schedule: Schedule) -> Iterator[Strike]:
    """Yield the planned strikes, without end unless the schedule has a count."""
    chance = random.Random(schedule.seed)
    number = 0
    while schedule.count is None or number < schedule.count:
        with_notice = schedule.notice == "always" or (schedule.notice == "alternate" and number % 2 == 1)
        yield Strike(chance.expovariate(1 / schedule.mean_s), chance.random(), with_notice)
        number += 1
