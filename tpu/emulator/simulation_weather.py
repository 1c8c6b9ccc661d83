"""What happens to a simulated cloud, and how often: stockouts, preemptions, slow starts, hangs, API errors.

Every draw comes from a seeded stream of its own (a place's, a host's, the calls'), so that a seed gives the same
history, and what one controller does changes little of what another would have met.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from tpu.clock import Clock
from tpu.emulator.capacity import Where
from tpu.emulator.errors import ApiError
from tpu.emulator.faults import Fault
from tpu.emulator.state import World

_ERRORS = ((14, "The service is currently unavailable."), (13, "an internal error has occurred"))


@dataclass(frozen=True)
class Lognormal:
    """Seconds that take mostly about `median_s`, and at times far longer; `spread` is sigma of their logarithm."""

    median_s: float
    spread: float = 0.5

    def draw(self, luck: Random) -> float:
        return luck.lognormvariate(math.log(self.median_s), self.spread)


@dataclass(frozen=True)
class CallWeather:
    """How long a call of the API takes, and which share of calls fails for no reason of the caller's."""

    takes: Lognormal = Lognormal(0.08, 0.4)
    error_share: float = 0.0

    def latency(self, luck: Random) -> float:
        return self.takes.draw(luck)

    def fault(self, luck: Random) -> Fault | None:
        """An error for this call, now and then; of one in three only the answer is lost."""
        if luck.random() >= self.error_share:
            return None
        code, message = luck.choice(_ERRORS)
        return Fault(ApiError(code, message), after=luck.random() < 1 / 3)


@dataclass(frozen=True)
class HostWeather:
    """Fate of hosts: seconds to boot and to take an SSH connection, mean seconds to a preemption or a hang.

    Only spot and preemptible nodes are preempted, with the notice of the world's settings for `notice_share` of
    them. None: never.
    """

    boot: Lognormal = Lognormal(90.0)
    ssh: Lognormal = Lognormal(4.0)
    mean_life_s: float | None = None
    notice_share: float = 0.8
    mean_to_hang_s: float | None = None


@dataclass(frozen=True)
class PlaceWeather:
    """Stockouts of a place: mean seconds between two and of one, and the share of spot nodes that it takes."""

    every_s: float | None = None
    lasts_s: float = 3600.0
    takes_share: float = 0.0


@dataclass(frozen=True)
class Weather:
    """All of it. The default is fair weather: nothing fails, and starts are slow."""

    calls: CallWeather = field(default_factory=CallWeather)
    hosts: HostWeather = field(default_factory=HostWeather)
    places: PlaceWeather = field(default_factory=PlaceWeather)


# A zone of our time: what researchers with spot quota tell of.
TYPICAL = Weather(
    calls=CallWeather(error_share=0.002),
    hosts=HostWeather(boot=Lognormal(150, 0.6), mean_life_s=6 * 3600, mean_to_hang_s=200 * 3600),
    places=PlaceWeather(every_s=12 * 3600, lasts_s=5400, takes_share=0.3),
)


class History:
    """What happened, in order: (simulated seconds, what). Of two runs of a seed it is the same."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.events: list[tuple[float, str]] = []
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, what: str) -> None:
        self.events.append((round(self._clock.monotonic(), 6), f"{kind} {what}"))
        self.counts[kind] += 1


def set_stockout(world: World, where: Where, on: bool) -> None:
    """Begin or end a stockout; who waits for capacity hears of it."""
    limits = world.settings.limits.with_stockout(where, on)
    world.settings = replace(world.settings, limits=limits)
    world.changed()


def stream(seed: int, *names: object) -> Random:
    """A seeded stream of draws for what the names name."""
    return Random("/".join(map(str, (seed, *names))))
