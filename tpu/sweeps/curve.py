"""A metric over steps in so few points that hundreds of trials' fit on a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MOST_POINTS = 60


def thinned(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> tuple[tuple[int, float], ...]:
    """At most `most` of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(i * (len(points) - 1) / (most - 1))] for i in range(most))


class Curve:
    """What a trial has logged so far; how much of it is kept does not grow with its steps."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._every = 1
        self._heard = 0

    def add(self, step: int, value: float) -> None:
        """Of a step that is done again the new value counts."""
        self._heard += 1
        if step in self._values or self._heard % self._every == 0:
            self._values[step] = value
        if len(self._values) > 2 * MOST_POINTS:
            self._values = dict(sorted(self._values.items())[::2])
            self._every *= 2

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        return thinned(sorted(self._values.items()))
