"""Which point of the space comes next: Optuna's samplers, and a grid in order.

What the bucket knows of a sweep is the truth; the study in Optuna's storage is made anew from it at each start, so
that optuna-dashboard shows it, and a lost database loses nothing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalChoiceType
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler, TPESampler
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.engine import make_url

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
            backend = _opened(storage)
            if study in optuna.get_all_study_names(storage=backend):
                optuna.delete_study(study_name=study, storage=backend)
            self._study = optuna.create_study(
                storage=backend, study_name=study, direction=search.metric.goal, sampler=self._sampler(0)
            )
        except ImportError as error:
            raise StudyError(
                f"search.storage {_without_password(storage)}: {error}; for PostgreSQL: "
                "pip install 'tpu-relay[postgres]'"
            ) from error
        except Exception as error:  # of whichever database
            raise StudyError(f"search.storage {_without_password(storage)}: {error}") from error

    def give(self, point: Mapping[str, Any]) -> None:
        """A point that comes from elsewhere: of an earlier start of the sweep, or of a person.

        One that is not in the space is trained all the same; the study then has its value, and nothing to learn of it.
        """
        if in_space(self._search.parameters, point):
            self._study.enqueue_trial(_for_optuna(self._search.parameters, point))
            self._ask()
            return
        asked = self._study.ask()
        asked.set_user_attr("parameters", dict(point))
        self._seen.add(canonical(point))
        self._asked[canonical(point)] = asked

    def knows(self, point: Mapping[str, Any]) -> bool:
        """Whether the point was given before."""
        return canonical(point) in self._seen

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

    def report(self, point: Mapping[str, Any], step: int, value: float) -> None:
        """How good a point was at a border."""
        if (asked := self._asked.get(canonical(point))) is not None:
            asked.report(value, step)

    def tell(self, point: Mapping[str, Any], value: float | None, pruned: bool = False) -> None:
        """How good a point was; None if its trials failed. Of one that was `pruned` its last report counts."""
        asked = self._asked.pop(canonical(point), None)
        if asked is None:
            return  # it was told before
        if pruned:
            self._study.tell(asked, state=TrialState.PRUNED)
        elif value is None:
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


def _opened(storage: str) -> optuna.storages.RDBStorage:
    """A storage by its URL. A SQLite file need not be safe on disk after each change: it is made anew at each start."""
    url = make_url(storage)
    if url.drivername in (
        "postgres",
        "postgresql",
        "postgresql+asyncpg",
    ):  # as Prefect has it, which is no driver here
        url = url.set(drivername="postgresql+psycopg")
    backend = optuna.storages.RDBStorage(url.render_as_string(hide_password=False))
    if backend.engine.dialect.name == "sqlite":
        event.listen(backend.engine, "connect", lambda connection, _: _hurry(connection.execute))
        with backend.engine.connect() as connection:  # the one that made the tables
            _hurry(connection.exec_driver_sql)
    return backend


def _hurry(execute: Callable[[str], object]) -> None:
    execute("pragma journal_mode=wal")  # another process, such as optuna-dashboard, may read meanwhile
    execute("pragma synchronous=normal")


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


def in_space(parameters: Mapping[str, Parameter], point: Mapping[str, Any]) -> bool:
    """Whether the search could have drawn this point."""
    chosen: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.applies(chosen):
            if name not in point or not parameter.allows(point[name]):
                return False
            chosen[name] = point[name]
    return chosen.keys() == point.keys()


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
