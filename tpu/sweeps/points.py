"""Which trials a sweep has, in order: points that are drawn or that people add, each with all seeds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpu.sweeps.config import Search
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import Trial


@dataclass(frozen=True)
class Draft:
    """A trial that is to begin. `added` counts the points that people have added; None if it was drawn."""

    point: int
    parameters: Mapping[str, Any]
    seed: int | None
    added: int | None = None


class Points:
    """What has begun and what comes next. At most `limit` trials come of drawn points."""

    def __init__(self, search: Search, searcher: Searcher) -> None:
        self.limit = search.runs
        self.exhausted = False
        self._searcher = searcher
        self._seeds: list[int | None] = [*search.seeds] or [None]
        self._begun: dict[int, list[Trial]] = {}
        self._points = 0  # so many have a number
        self._drawn = 0  # so many trials of drawn points have begun
        self._rest: deque[Draft] = deque()  # what is left of the point that was drawn last
        self._added: deque[Draft] = deque()

    def recall(self, trials: Iterable[Trial]) -> None:
        """Those that earlier starts of the sweep have begun, in order; a point of which seeds are missing gets them."""
        for trial in trials:
            if trial.point not in self._begun:
                self._searcher.give(trial.parameters)
            self.begin(trial)
        for point, (first, *others) in self._begun.items():
            had = {first.seed, *(trial.seed for trial in others)}
            left = [seed for seed in self._seeds if seed not in had]
            drafts = [Draft(point, first.parameters, seed, first.added) for seed in left]
            (self._rest if first.added is None else self._added).extend(drafts)

    def begin(self, trial: Trial) -> None:
        self._begun.setdefault(trial.point, []).append(trial)
        self._points = max(self._points, trial.point + 1)
        self._drawn += trial.added is None

    def add(self, number: int, parameters: Mapping[str, Any]) -> bool:
        """The point that a person has added as their `number`; False if the sweep has it already."""
        if self._searcher.knows(parameters):
            return any(trials[0].added == number for trials in self._begun.values())
        self._searcher.give(parameters)
        self._added.extend(Draft(self._points, parameters, seed, number) for seed in self._seeds)
        self._points += 1
        return True

    def next(self) -> Draft | None:
        """The next one to begin; None if there is none."""
        if self._added:
            return self._added.popleft()
        if self._drawn >= self.limit:
            return None
        if not self._rest and not self.exhausted:
            parameters = self._searcher.next()
            if parameters is None:
                self.exhausted = True
            else:
                self._rest.extend(Draft(self._points, parameters, seed) for seed in self._seeds)
                self._points += 1
        return self._rest.popleft() if self._rest else None

    @property
    def left(self) -> int:
        """How many are still to begin, as far as is known."""
        drawn = len(self._rest) if self.exhausted else max(0, self.limit - self._drawn)
        return len(self._added) + drawn

    def of(self, point: int) -> list[Trial]:
        """The trials of a point that have begun."""
        return self._begun[point]

    def complete(self, point: int) -> bool:
        """Whether no other trial of the point will begin, as far as is known."""
        begun = self._begun[point]
        cut = begun[0].added is None and self._drawn >= self.limit
        return len(begun) == len(self._seeds) or cut
