"""Whether a trial goes on at a border: asked of Optuna's pruners, over what all trials have reported.

The trials of this study are runs, one a seed, and it is kept in memory only: what they reported is in the bucket, and
is told again when a sweep is taken up.
"""

from __future__ import annotations

import math
from statistics import median

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

from tpu.sweeps.metric import Metric
from tpu.sweeps.outcome import State
from tpu.sweeps.pruner import Pruner


class Judge:
    """Hears every value at a border, and says of a trial why it is not to go on."""

    def __init__(self, pruner: Pruner | None, sweep: str, metric: Metric) -> None:
        """`pruner` has its defaults filled in."""
        self._pruner = pruner
        self._metric = metric.name
        self._minimize = metric.goal == "minimize"
        self._worst = math.inf if self._minimize else -math.inf
        self._until = (pruner.max_resource if pruner else None) or math.inf
        # Hyperband draws a trial's bracket from the study's name and the trial's number.
        self._study = optuna.create_study(study_name=sweep, direction=metric.goal, pruner=_made(pruner))
        self._trials: dict[int, optuna.Trial] = {}
        self._values: dict[int, dict[int, float]] = {}
        self._finished: set[int] = set()

    def begin(self, number: int) -> None:
        """A trial; they come in order of their numbers. One that is begun again goes on."""
        if number not in self._trials:
            self._trials[number] = self._study.ask()
            self._values[number] = {}

    def hear(self, number: int, step: int, value: float) -> str | None:
        """Why the trial is to be stopped after this value; None if it goes on, or the value was heard before."""
        values = self._values[number]
        if step in values:
            return None
        values[step] = value
        trial = self._trials[number]
        # Pruners take what is no number for the worst, too, but with warnings.
        trial.report(self._worst if math.isnan(value) else value, step)
        return self._why(number, step, value) if step < self._until and trial.should_prune() else None

    def value(self, number: int, step: int) -> float | None:
        """What a trial has reported at a step."""
        return self._values[number].get(step)

    def heard(self, number: int) -> tuple[tuple[int, float], ...]:
        """All that a trial has reported, by step."""
        return tuple(sorted(self._values[number].items()))

    def end(self, number: int, state: State) -> None:
        """What has finished is what the median is made of. A trial that failed may be begun again."""
        if state == "finished" and number not in self._finished:
            self._finished.add(number)
            values = self._values[number]
            self._study.tell(self._trials[number], values[max(values)] if values else 0.0)

    def _why(self, number: int, step: int, value: float) -> str:
        assert self._pruner is not None
        told = f"{self._pruner.type}: {self._metric} {value:.6g} at step {step}"
        if math.isnan(value):
            return f"{told} is no number"
        others = {n: v[step] for n, v in self._values.items() if n != number and step in v}
        if self._pruner.type == "median":
            finished = [other for n, other in others.items() if n in self._finished]
            best = (min if self._minimize else max)(self._values[number].values())
            return (
                f"median: {self._metric} {best:.6g}, the best up to step {step}, is worse than {median(finished):.6g}, "
                f"the median of {len(finished)} finished trial(s) there"
            )
        among = sorted([*others.values(), value], reverse=not self._minimize)
        where = (
            "of its bracket" if self._pruner.type == "hyperband" else f"of the {len(among)} that came there"
        )
        return f"{told} is not in the best 1/{self._pruner.eta} {where}; the best has {among[0]:.6g}"


def _made(pruner: Pruner | None) -> BasePruner:
    if pruner is None:
        return NopPruner()
    if pruner.type == "median":
        return MedianPruner(
            pruner.startup_trials, pruner.n_warmup_steps or 0, n_min_trials=pruner.n_min_trials or 1
        )
    assert pruner.min_resource is not None
    if pruner.type == "successive-halving":
        return SuccessiveHalvingPruner(pruner.min_resource, pruner.eta)
    assert pruner.max_resource is not None
    return HyperbandPruner(pruner.min_resource, pruner.max_resource, pruner.eta)
