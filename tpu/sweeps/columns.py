"""Where values stand on an axis of a picture: numbers on a scale, words one above the other. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Any

# From this ratio on positive numbers stand on a logarithmic scale.
_LOGARITHMIC = 30.0
# So few different numbers have a tick each; where two would come closer than the gap, all stand evenly.
_MOST_TICKS, _LEAST_GAP = 8, 0.07
# Quartile distances beyond which a value stands at the edge: one trial that diverged must not flatten all others.
_FAR = 3.0


@dataclass(frozen=True)
class Scale:
    """From numbers to 0…1; what lies outside `low` and `high` stands at the edge."""

    low: float
    high: float
    logarithmic: bool

    def at(self, value: float) -> float:
        low, high, value = (self._shown(one) for one in (self.low, self.high, value))
        return 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))

    def _shown(self, value: float) -> float:
        if not self.logarithmic:
            return value
        return math.log(value) if value > 0 else -math.inf


@dataclass(frozen=True)
class Column:
    """Positions, 0…1, of the values of one parameter, and what is written beside the axis."""

    places: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]


def robust_scale(values: Sequence[float]) -> Scale:
    """The scale on which these finite numbers are told apart; there is at least one."""
    ordered = sorted(values)
    logarithmic = ordered[0] > 0 and ordered[-1] / ordered[0] >= _LOGARITHMIC
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 8:
        shown = [math.log(one) for one in ordered] if logarithmic else ordered
        first, _, third = quantiles(shown, n=4)
        reach = _FAR * (third - first)
        if reach > 0:
            inside = [
                one for one, at in zip(ordered, shown, strict=True) if first - reach <= at <= third + reach
            ]
            low, high = inside[0], inside[-1]
    return Scale(low, high, logarithmic)


def number_column(values: Sequence[float]) -> Column:
    """Of finite numbers; few different ones have a tick each."""
    different = sorted(set(values))
    scale = Scale(
        different[0], different[-1], different[0] > 0 and different[-1] / different[0] >= _LOGARITHMIC
    )
    if len(different) <= _MOST_TICKS:
        places = [scale.at(one) for one in different]
        if any(b - a < _LEAST_GAP for a, b in pairwise(places)):
            places = [_evenly(i, len(different)) for i in range(len(different))]
        where = dict(zip(different, places, strict=True))
        return Column(
            tuple(where[one] for one in values), tuple((at, f"{one:g}") for one, at in where.items())
        )
    return Column(tuple(scale.at(one) for one in values), scale_ticks(scale))


def scale_ticks(
    scale: Scale, least: float | None = None, most: float | None = None
) -> tuple[tuple[float, str], ...]:
    """The ends of a scale and its middle; an end beyond which values lie (`least`, `most`) says so."""
    if scale.high <= scale.low:
        return ((0.5, f"{scale.low:.4g}"),)
    middle = math.sqrt(scale.low * scale.high) if scale.logarithmic else (scale.low + scale.high) / 2
    under = "≤ " if least is not None and least < scale.low else ""
    over = "≥ " if most is not None and most > scale.high else ""
    return (
        (0.0, f"{under}{scale.low:.3g}"),
        (scale.at(middle), f"{middle:.3g}"),
        (1.0, f"{over}{scale.high:.3g}"),
    )


def column_of(values: Sequence[Any]) -> Column:
    """Of the values of a parameter; None is a trial to which it does not apply."""
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if numbers and len(numbers) == len(values) and all(map(math.isfinite, numbers)):
        return number_column([float(one) for one in numbers])
    words = ["–" if one is None else one if isinstance(one, str) else json.dumps(one) for one in values]
    different = sorted(set(words), key=lambda word: (word != "–", words.index(word)))
    where = {word: _evenly(i, len(different)) for i, word in enumerate(different)}
    step = -(-len(different) // 12)
    return Column(
        tuple(where[word] for word in words),
        tuple((where[word], word if len(word) <= 14 else f"{word[:13]}…") for word in different[::step]),
    )


def _evenly(index: int, count: int) -> float:
    return 0.5 if count == 1 else index / (count - 1)
