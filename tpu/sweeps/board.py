"""The table of a sweep: one row a trial, from what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu.runs.event_log import RunEvent
from tpu.runs.ledger import make_sum
from tpu.sweeps.curve import Curve
from tpu.sweeps.metric import EVALUATION
from tpu.sweeps.outcome import Outcome, State
from tpu.sweeps.trial import Trial
from tpu.sweeps.usage import Use, uses_of


@dataclass
class Live:
    """What is heard of a trial that has begun and not ended; `events` is its run's history, as it grows.

    `placed` says that it has chips, or a slice on its way.
    """

    step: int = 0
    value: float | None = None
    where: str = ""
    curve: Curve = field(default_factory=Curve)
    events: Sequence[RunEvent] = ()
    placed: bool = False
    evaluating: bool = False
    freed: bool = False
    on_free: Callable[[], None] = lambda: None

    def free(self) -> None:
        """It needs its chips no more: what is left to do takes a while, and is done on the flow's own machine."""
        self.freed = True
        self.on_free()


@dataclass(frozen=True)
class Standing:
    """How a trial is now. `ended` is seconds since 1970, None of one that has not; `dollars` are None if no price is
    known."""

    trial: Trial
    state: State | Literal["running", "evaluating", "waiting"]
    step: int
    value: float | None
    where: str
    attempts: int
    dollars: float | None
    ended: float | None
    curve: tuple[tuple[int, float], ...]
    uses: tuple[Use, ...]
    reason: str

    @property
    def chip_hours(self) -> float:
        return sum(use.chip_hours for use in self.uses)


@dataclass
class Board:
    """All trials of a sweep by number; `began` and `ended` grow, `live` holds those between."""

    metric: str
    goal: Literal["minimize", "maximize"]
    began: dict[int, Trial] = field(default_factory=dict)
    ended: dict[int, Outcome] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)

    def standings(self, now: float) -> list[Standing]:
        """How each trial is at `now` (seconds since 1970), in order."""
        return [self._standing(trial, now) for _, trial in sorted(self.began.items())]

    def _standing(self, trial: Trial, now: float) -> Standing:
        if (outcome := self.ended.get(trial.number)) is not None:
            where = ", ".join(outcome.slices)
            if outcome.uses:
                where = ", ".join(dict.fromkeys(use.where for use in outcome.uses))
            return Standing(
                trial, outcome.state, outcome.step, outcome.value, where, outcome.attempts, outcome.dollars,
                outcome.ended, outcome.curve, outcome.uses, outcome.reason,
            )  # fmt: skip
        live = self.live.get(trial.number)
        if live is None:
            return Standing(trial, "waiting", 0, None, "", 0, None, None, (), (), "")
        events = list(live.events)
        uses = uses_of(events, now)
        state = "evaluating" if live.evaluating else "running"
        attempts = sum(event.kind == "attempt-started" for event in events)
        return Standing(
            trial, state, live.step, live.value, _where(live, uses), attempts,
            make_sum(events, now).dollars if uses else None, None, live.curve.points, uses, "",
        )  # fmt: skip

    def rows(self, now: float) -> list[dict[str, Any]]:
        return [self._row(one) for one in self.standings(now)]

    def _row(self, one: Standing) -> dict[str, Any]:
        outcome = self.ended.get(one.trial.number)
        return {
            "trial": one.trial.number,
            "run": one.trial.run,
            **dict(one.trial.parameters),
            **({} if one.trial.seed is None else {"seed": one.trial.seed}),
            **({} if one.trial.pack is None else {"pack": one.trial.pack}),
            "state": one.state,
            "step": one.step,
            self.metric: one.value,
            "where": one.where,
            "attempts": one.attempts,
            "dollars": one.dollars,
            "chip_hours": round(one.chip_hours, 6),
            "parameters_sha256": outcome.parameters_sha256 if outcome else None,
            "code": ", ".join(part[:12] for part in outcome.code) if outcome else "",
            "mixed": outcome.mixed if outcome else "",
            "reason": one.reason,
            **({f"{EVALUATION}{name}": value for name, value in outcome.figures.items()} if outcome else {}),
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


def _where(live: Live, uses: Sequence[Use]) -> str:
    """The VM that speaks, and the chips of it."""
    now = next((use for use in reversed(uses) if live.where.startswith(f"{use.slice}-w")), None)
    if now is None:
        return live.where or (uses[-1].where if uses else "")
    return live.where + now.where.removeprefix(now.slice)


def mean_value(outcomes: Iterable[Outcome]) -> float | None:
    """The value of a point: the mean of its trials that finished with one."""
    values = [one.value for one in outcomes if one.state == "finished" and one.value is not None]
    return sum(values) / len(values) if values else None


def told(parameters: Mapping[str, Any], seed: int | None) -> str:
    """Such as `optimizer.learning_rate=0.003, seed=1`."""
    parts = [f"{name}={value}" for name, value in parameters.items()]
    return ", ".join(parts + ([] if seed is None else [f"seed={seed}"]))


def short_name(name: str, among: Collection[str]) -> str:
    """The last part of a dotted name, unless another one ends so, too."""
    last = name.rpartition(".")[2]
    return name if sum(one.rpartition(".")[2] == last for one in among) > 1 else last
