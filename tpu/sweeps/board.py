"""The table of a sweep: one row a trial, from what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu.sweeps.outcome import Outcome
from tpu.sweeps.trial import Trial


@dataclass
class Live:
    """What is heard of a trial that has begun and not ended."""

    step: int = 0
    value: float | None = None
    where: str = ""
    attempts: int = 0


@dataclass
class Board:
    """All trials of a sweep by number; `began` and `ended` grow, `live` holds those between."""

    metric: str
    goal: Literal["minimize", "maximize"]
    began: dict[int, Trial] = field(default_factory=dict)
    ended: dict[int, Outcome] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(trial) for _, trial in sorted(self.began.items())]

    def _row(self, trial: Trial) -> dict[str, Any]:
        outcome, live = self.ended.get(trial.number), self.live.get(trial.number, Live())
        return {
            "trial": trial.number,
            "run": trial.run,
            **dict(trial.parameters),
            **({} if trial.seed is None else {"seed": trial.seed}),
            **({} if trial.pack is None else {"pack": trial.pack}),
            "state": outcome.state if outcome else ("running" if trial.number in self.live else "waiting"),
            "step": outcome.step if outcome else live.step,
            self.metric: outcome.value if outcome else live.value,
            "where": ", ".join(outcome.slices) if outcome else live.where,
            "attempts": outcome.attempts if outcome else live.attempts,
            "dollars": outcome.dollars if outcome else None,
            "parameters_sha256": outcome.parameters_sha256 if outcome else None,
            "code": ", ".join(one[:12] for one in outcome.code) if outcome else "",
            "mixed": outcome.mixed if outcome else "",
            "reason": outcome.reason if outcome else "",
        }

    def best(self) -> tuple[Trial, float] | None:
        """The finished trial with the best value."""
        found = [
            (trial, outcome.value)
            for number, outcome in self.ended.items()
            if outcome.state == "finished" and outcome.value is not None
            for trial in [self.began[number]]
        ]
        if not found:
            return None
        sign = 1 if self.goal == "minimize" else -1
        return min(found, key=lambda one: (sign * one[1], one[0].number))

    def count(self, *states: str) -> int:
        return sum(outcome.state in states for outcome in self.ended.values())


def mean_value(outcomes: Iterable[Outcome]) -> float | None:
    """The value of a point: the mean of its trials that finished with one."""
    values = [one.value for one in outcomes if one.state == "finished" and one.value is not None]
    return sum(values) / len(values) if values else None


def told(parameters: Mapping[str, Any], seed: int | None) -> str:
    """Such as `optimizer.learning_rate=0.003, seed=1`."""
    parts = [f"{name}={value}" for name, value in parameters.items()]
    return ", ".join(parts + ([] if seed is None else [f"seed={seed}"]))
