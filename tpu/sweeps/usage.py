"""Which chips trials had, when, and when their programs ran on them: from the histories of their runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from tpu.runs.event_log import RunEvent
from tpu.runs.ledger import holdings


@dataclass(frozen=True)
class Use:
    """A trial had `count` of the `of` chips of a slice, from `start` to `end`; `chips` are their numbers, as far as
    they are known. `trained` are the stretches in which its program ran there. Times are seconds since 1970.

    In a pack the chips are those of `shared_by` trials, an equal part of each.
    """

    slice: str
    chips: tuple[int, ...]
    count: int
    of: int
    start: float
    end: float
    trained: tuple[tuple[float, float], ...] = ()
    shared_by: int = 1

    @property
    def chip_hours(self) -> float:
        return self.count * (self.end - self.start) / 3600 / self.shared_by

    @property
    def where(self) -> str:
        """The slice, and which of its chips if they are not all."""
        if self.count == self.of or not self.chips:
            return self.slice
        return f"{self.slice} {'chip' if self.count == 1 else 'chips'} {', '.join(map(str, self.chips))}"


@dataclass(frozen=True)
class SliceLife:
    """A slice of so many chips was there from `ready` to `gone` (seconds since 1970)."""

    chips: int
    ready: float
    gone: float


@dataclass(frozen=True)
class FleetPoint:
    """From `time` (seconds since 1970) on so many chips were `there`, `held` by trials, and their programs `trained` on
    so many. Trials of a pack may come and go apart, so that parts of a chip are counted."""

    time: float
    there: float
    held: float
    trained: float


def uses_of(events: Sequence[RunEvent], until: float) -> tuple[Use, ...]:
    """The uses of one run, in order; those that go on end at `until` (seconds since 1970)."""
    chips: dict[str, tuple[int, ...]] = {}
    begun: dict[int, tuple[str, float]] = {}
    trained: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        detail = event.detail
        match event.kind:
            case "slice-intended" | "slice-leased" | "share":
                chips[detail["slice"]] = tuple(detail.get("chips") or ())
            case "attempt-started":
                begun[detail["attempt"]] = (detail["slice"], event.time)
            case "attempt-ended" if detail["attempt"] in begun:
                name, since = begun.pop(detail["attempt"])
                trained.setdefault(name, []).append((since, max(since, detail.get("ended", event.time))))
    for name, since in begun.values():
        trained.setdefault(name, []).append((since, max(since, until)))
    found = []
    for one in holdings(events, until):
        start, end = one.start / 1e6, one.end / 1e6
        there = tuple(
            (max(a, start), min(b, end)) for a, b in trained.get(one.slice, ()) if min(b, end) > max(a, start)
        )
        found.append(
            Use(
                one.slice,
                chips[one.slice],
                one.chips,
                one.of // one.shared_by,
                start,
                end,
                there,
                one.shared_by,
            )
        )
    return tuple(found)


def fleet_use(uses: Iterable[Use], lives: Mapping[str, SliceLife]) -> list[FleetPoint]:
    """How many chips were there and what they did, a point a change.

    A slice of which no life is known counts from its first use to its last.
    """
    changes: dict[float, list[Fraction]] = {}

    def count(chips: Fraction, start: float, end: float, kind: int) -> None:
        for time, sign in ((start, 1), (end, -1)):
            changes.setdefault(time, [Fraction(0)] * 3)[kind] += sign * chips

    known = dict(lives)
    for use in uses:
        part = Fraction(use.count, use.shared_by)
        count(part, use.start, use.end, 1)
        for start, end in use.trained:
            count(part, start, end, 2)
        if use.slice not in lives:
            life = known.get(use.slice, SliceLife(use.of, use.start, use.end))
            known[use.slice] = SliceLife(use.of, min(life.ready, use.start), max(life.gone, use.end))
    for life in known.values():
        count(Fraction(life.chips), life.ready, max(life.ready, life.gone), 0)
    now = [Fraction(0)] * 3
    points = []
    for time, change in sorted(changes.items()):
        now = [a + b for a, b in zip(now, change, strict=True)]
        # Clocks of several machines wrote these times: what is held is there.
        shown = max(now[0], now[1]), now[1], min(now[1], now[2])
        points.append(FleetPoint(time, *map(float, shown)))
    return points


def busy_share(points: Sequence[FleetPoint]) -> float | None:
    """The part of all chip-seconds that were there in which a trial's program ran; None if none were."""
    there = sum(a.there * (b.time - a.time) for a, b in pairwise(points))
    trained = sum(a.trained * (b.time - a.time) for a, b in pairwise(points))
    return trained / there if there else None
