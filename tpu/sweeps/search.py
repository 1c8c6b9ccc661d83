"""Which point of the space comes next: Optuna's samplers, and a grid in order.

What the bucket knows of a sweep is the truth; the study in Optuna's storage is made anew from it at each start, so
that optuna-dashboard shows it, and a lost database loses nothing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalChoiceType
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from tpu.sweeps import grid
from tpu.sweeps.config import Search
from tpu.sweeps.parameters import Parameter, canonical

optuna.logging.set_verbosity(optuna.logging.WARNING)
# So often in a row a point that was tried already comes before the space is taken to be used up.
MOST_REPEATS = 50


class StudyError(RuntimeError):
    """Optuna's storage cannot be used; the message says which, and why."""


class Searcher:
    """Gives points that differ from all before, and hears how good they are."""

    def __init__(self, search: Search, study: str, storage: str) -> None:
        """Raises StudyError: the storage does not answer."""
        self._search = search
        self._grid: Iterator[dict[str, Any]] | None = None
        if search.method == "grid":
            self._grid = grid.points(search.parameters)
        self._seen: set[str] = set()
        self._asked: dict[str, optuna.Trial] = {}
        try:
            backend = optuna.storages.RDBStorage(storage)
            if study in optuna.get_all_study_names(storage=backend):
                optuna.delete_study(study_name=study, storage=backend)
            self._study = optuna.create_study(
                storage=backend, study_name=study, direction=search.metric.goal, sampler=self._sampler(0)
            )
        except Exception as error:  # of whichever database
            raise StudyError(f"search.storage {_without_password(storage)}: {error}") from error

    def replay(self, point: Mapping[str, Any]) -> None:
        """A point that an earlier start of the sweep has given; `tell` says what became of it."""
        self._study.enqueue_trial(_for_optuna(self._search.parameters, point))
        self._ask()

    def next(self) -> dict[str, Any] | None:
        """A new point; None if there is none any more."""
        if self._grid is not None:
            for point in self._grid:
                if canonical(point) not in self._seen:
                    self._study.enqueue_trial(_for_optuna(self._search.parameters, point))
                    return self._ask()
            return None
        for _ in range(MOST_REPEATS):
            if (point := self._ask()) is not None:
                return point
        return None

    def _ask(self) -> dict[str, Any] | None:
        # Of a number in the study alone: a sweep that is started again goes on as it would have.
        self._study.sampler = self._sampler(len(self._study.get_trials(deepcopy=False)))
        asked = self._study.ask()
        point: dict[str, Any] = {}
        for name, parameter in self._search.parameters.items():
            if parameter.applies(point):
                point[name] = _suggest(asked, name, parameter)
        key = canonical(point)
        if key in self._seen:
            self._study.tell(asked, state=TrialState.PRUNED)
            return None
        self._seen.add(key)
        self._asked[key] = asked
        return point

    def tell(self, point: Mapping[str, Any], value: float | None) -> None:
        """How good a point was; None if its trials failed."""
        asked = self._asked.pop(canonical(point), None)
        if asked is None:
            return  # it was told before
        if value is None:
            self._study.tell(asked, state=TrialState.FAIL)
        else:
            self._study.tell(asked, value)

    def _sampler(self, number: int) -> BaseSampler:
        seed = self._search.search_seed
        match self._search.method:
            case "quasi-random":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ExperimentalWarning)
                    return QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
            case "tpe":
                # Those that still train count as bad ones, so that many at once do not all go to the same place.
                return TPESampler(seed=seed + number, constant_liar=True)
            case _:
                return RandomSampler(seed=seed + number)


def storage_url(search: Search, folder: Path, bucket: str, sweep: str) -> str:
    """Where the study is: what the sweep says, or a file of this machine.

    Raises:
        StudyError: the variable that holds it is not set.
    """
    if search.storage is not None:
        kind, _, variable = search.storage.partition(":")
        if kind != "env":
            return search.storage
        if not (url := os.environ.get(variable)):
            raise StudyError(f"search.storage: the variable {variable} is not set where the flow runs")
        return url
    place = folder / "sweeps" / bucket.removeprefix("gs://").replace("/", "-")
    place.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{place}/{sweep}.db"


def _suggest(asked: optuna.Trial, name: str, parameter: Parameter) -> Any:
    if parameter.min is None:
        choices = list(parameter.choices or [])
        words = [_choice(value) for value in choices]
        return choices[words.index(asked.suggest_categorical(name, words))]
    span = parameter.span
    if span.whole:
        step = 1 if span.log else int(span.step or 1)
        return asked.suggest_int(name, int(span.low), int(span.high), step=step, log=span.log)
    return asked.suggest_float(name, span.low, span.high, step=span.step, log=span.log)


def _choice(value: Any) -> CategoricalChoiceType:
    """What Optuna can keep of a value."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _for_optuna(parameters: Mapping[str, Parameter], point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _choice(value) if parameters[name].min is None else value for name, value in point.items()}


def _without_password(url: str) -> str:
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"
