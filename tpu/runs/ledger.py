"""What a run's slices cost: each chip-second at its candidate's price, to a segment and a goodput bucket. Pure.

A slice costs from the moment it is ready (or leased from the pool) until the cloud says that it is gone (or it is
given back), in the share of its chips that the run holds. Time is counted in whole microseconds, so that the charges
of a slice sum exactly to what it was held. A price that nobody set is not 0: those chip-seconds are told apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tpu.runs.event_log import RunEvent, candidate_in
from tpu.runs.goodput import Bucket, Interval, pieces, run_intervals
from tpu.topology import accelerator_type

_MICROSECONDS = 1_000_000
_CHIP_US_AN_HOUR = 3600 * _MICROSECONDS


@dataclass(frozen=True)
class Holding:
    """`chips` of a slice with `of` chips, held from `start` to `end` (microseconds since 1970).

    Of a run of a pack `of` is the slice's chips times the `shared_by` runs that share them.

    `price_an_hour` is that of the whole slice in US dollars, None if nobody set it. `open` is True if the run holds it
    still.
    """

    slice: str
    candidate: str
    start: int
    end: int
    chips: int
    of: int
    price_an_hour: float | None
    open: bool
    shared_by: int = 1

    @property
    def chip_us(self) -> int:
        return (self.end - self.start) * self.chips

    def dollars(self, chip_us: int) -> float | None:
        """Price of so many chip-microseconds of this slice."""
        if self.price_an_hour is None:
            return None
        return self.price_an_hour * chip_us / (self.of * _CHIP_US_AN_HOUR)


@dataclass(frozen=True)
class Charge:
    """Part of a holding that went to one segment (counted from 1) and one bucket; `dollars` is None without a price."""

    holding: Holding
    segment: int
    bucket: Bucket
    chip_us: int

    @property
    def dollars(self) -> float | None:
        return self.holding.dollars(self.chip_us)


Key = TypeVar("Key")


@dataclass(frozen=True)
class Ledger:
    """What a run has held and to what it is charged. `egress` has dollars by what was moved, as far as events tell."""

    holdings: tuple[Holding, ...] = ()
    charges: tuple[Charge, ...] = ()
    egress: Mapping[str, float] = field(default_factory=dict)

    @property
    def dollars(self) -> float | None:
        """All that is known to have been spent; None if slices were held and no price of any is known."""
        known = [price for one in self.holdings if (price := one.dollars(one.chip_us)) is not None]
        if self.holdings and not known:
            return None
        return sum(known) + sum(self.egress.values())

    @property
    def unpriced_s(self) -> dict[str, float]:
        """Slice-seconds without a price, by candidate."""
        found: dict[str, float] = {}
        for one in self.holdings:
            if one.price_an_hour is None and one.chip_us:
                seconds = one.chip_us / one.of / _MICROSECONDS
                found[one.candidate] = found.get(one.candidate, 0.0) + seconds
        return found

    @property
    def dollars_an_hour(self) -> float:
        """What the slices that are held now cost, as far as their prices are known."""
        return sum((one.price_an_hour or 0.0) * one.chips / one.of for one in self.holdings if one.open)

    def by(self, key: Callable[[Charge], Key]) -> dict[Key, float]:
        """Dollars of the charges with a price, summed by `key`; egress is not among them."""
        sums: dict[Key, float] = {}
        for charge in self.charges:
            if (dollars := charge.dollars) is not None:
                sums[key(charge)] = sums.get(key(charge), 0.0) + dollars
        return sums


def holdings(events: Sequence[RunEvent], until: float) -> tuple[Holding, ...]:
    """Which slices a run has held, how much of each and for how long, in the order in which it got them."""
    wanted: dict[str, Mapping[str, Any]] = {}
    since: dict[str, float] = {}
    found: list[Holding] = []
    for event in events:
        name: str = event.detail.get("slice", "")
        match event.kind:
            case "slice-intended":
                wanted[name] = event.detail
            case "slice-ready" if name in wanted:
                wanted[name] = {**wanted[name], **event.detail}
                since.setdefault(name, event.time)
            case "slice-leased":
                wanted[name] = {**wanted.get(name, {}), **event.detail}
                since.setdefault(name, event.time)
            case "slice-deleted" | "slice-released" if name in since:
                found.append(_holding(wanted[name], since.pop(name), event.time, open=False))
            case "share":  # of what a pack holds: see tpu.runs.shares
                at = event.detail["at"]
                if name in since:
                    found.append(_holding(wanted[name], since.pop(name), at, open=False))
                if event.detail["shared_by"]:
                    wanted[name], since[name] = event.detail, at
    found += [_holding(wanted[name], start, until, open=True) for name, start in since.items()]
    return tuple(sorted(found, key=lambda one: one.start))


def _holding(detail: Mapping[str, Any], start: float, end: float, *, open: bool) -> Holding:
    candidate, held = candidate_in(detail), detail.get("chips")
    kind = accelerator_type(candidate.accelerator_type)
    shared_by = detail.get("shared_by", 1)
    return Holding(
        slice=detail["slice"],
        candidate=str(candidate),
        start=_us(start),
        end=max(_us(start), _us(end)),  # a clock that was set back costs nothing
        chips=kind.chips if held is None else len(held),
        of=kind.chips * shared_by,
        price_an_hour=candidate.price_an_hour,
        open=open,
        shared_by=shared_by,
    )


def _us(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def make_sum(events: Sequence[RunEvent], until: float) -> Ledger:
    """A ledger without charges: what was held up to `until` (seconds since 1970), and what it costs in all."""
    egress: dict[str, float] = {}
    for event in events:
        if event.kind == "egress":
            what = event.detail["what"]
            egress[what] = egress.get(what, 0.0) + event.detail["dollars"]
    return Ledger(holdings(events, until), egress=egress)


def make_ledger(events: Sequence[RunEvent], segments: Sequence[int], until: float) -> Ledger:
    """The ledger of a run with these stop steps, from its events up to `until` (seconds since 1970)."""
    ledger = make_sum(events, until)
    held = ledger.holdings
    if not held:
        return ledger
    begin, end = min(one.start for one in held), max(one.end for one in held)
    known = [Interval(i.bucket, _us(i.start), _us(i.end)) for i in run_intervals(events)]
    cut = _cut_at(pieces(known, begin, end), borders := segment_borders(events, segments))
    starts = [int(piece.start) for piece in cut]
    charges: list[Charge] = []
    for one in held:
        sums: dict[tuple[int, Bucket], int] = {}
        for index in range(max(0, bisect_right(starts, one.start) - 1), len(cut)):
            piece = cut[index]
            if piece.start >= one.end:
                break
            overlap = int(min(piece.end, one.end) - max(piece.start, one.start))
            segment = min(bisect_right(borders, piece.start) + 1, max(len(segments), 1))
            key = (segment, piece.bucket)
            sums[key] = sums.get(key, 0) + overlap * one.chips
        charges += [Charge(one, *key, chip_us) for key, chip_us in sorted(sums.items()) if chip_us]
    return replace(ledger, charges=tuple(charges))


def segment_borders(events: Sequence[RunEvent], segments: Sequence[int]) -> list[int]:
    """When each segment but the last was first committed, in microseconds, ascending; fewer if it was not."""
    commits: list[tuple[float, int]] = []
    for event in events:
        if event.kind == "attempt-ended":
            commits += [(at, step) for at, step in event.detail.get("commits", ())]
            if (last := event.detail.get("last_commit")) is not None:
                commits.append((event.detail.get("ended", event.time), last))
    borders: list[int] = []
    reached = 0
    for at, step in sorted(commits):
        reached = max(reached, step)
        while len(borders) < len(segments) - 1 and segments[len(borders)] <= reached:
            borders.append(_us(at))
    return borders


def _cut_at(found: Sequence[Interval], borders: Sequence[int]) -> list[Interval]:
    cut: list[Interval] = []
    for piece in found:
        start = piece.start
        for border in borders[bisect_right(borders, piece.start) : bisect_right(borders, piece.end)]:
            if start < border < piece.end:
                cut.append(Interval(piece.bucket, start, border))
                start = border
        cut.append(Interval(piece.bucket, start, piece.end))
    return cut
