"""The sweep file: a base run, a search space, and how the space is gone through.

It is a run configuration under `run` and the fields of `Search` beside it. A Weights & Biases sweep file, which has
`program` and `command` in place of a run, is read unchanged; what of it has no effect is said.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tpu.runs.config import RunConfig, RunConfigError, apply_changes, parse_run_config
from tpu.sweeps import grid
from tpu.sweeps.figures import known_figures
from tpu.sweeps.metric import Metric
from tpu.sweeps.packing import check_packable
from tpu.sweeps.parameters import Parameter
from tpu.sweeps.program import program_words, takes_arguments
from tpu.sweeps.pruner import Pruner, PrunerError, for_trials, of_wandb
from tpu.sweeps.trial import NAME_LENGTH, trial_run
from tpu.topology import accelerator_type
from tpu.train.form import plain_optionals
from tpu.train.packs import MOST_LANES, PackError

# More trials than anybody waits for: who wants them says so by several sweeps.
MOST_TRIALS = 10_000
# What of a Weights & Biases sweep file has no effect here, and why.
_WITHOUT_EFFECT = {
    "project": "results are in the bucket",
    "entity": "results are in the bucket",
    "description": "it is not shown",
    "controller": "tpu-relay chooses the points",
    "job": "the program is `program` or `command`",
}
# The metrics that the built-in trainings log, before anybody has started one.
_LOGGED = {"icl": ("loss",), "bytelm": ("loss",)}


class SweepError(ValueError):
    """A sweep cannot be; the message names the field, what was found and what to write."""


class Search(BaseModel):
    """The search space of a sweep, and how it is gone through."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)

    method: Literal["grid", "random", "quasi-random", "tpe"] = Field(
        default="grid",
        description="Every point, or points chosen at random, evenly, or by what was best so far.",
    )
    metric: Metric = Field(default=Metric(), description="By what trials are compared.")
    parameters: dict[str, Parameter] = Field(
        description="The space: dotted fields of the run such as training.seed, or, where the command has "
        "${args}, arguments of the program."
    )
    seeds: list[int] = Field(
        default=[], description="Each point is trained with each of these seeds, and their mean counts."
    )
    trials: int | None = Field(
        default=None, ge=1, description="At most so many runs; a grid has an end of its own."
    )
    at_once: int | None = Field(
        default=None, ge=1, description="At most so many at once; as many as the pool's chips allow if empty."
    )
    pack: int | None = Field(
        default=None,
        ge=2,
        le=MOST_LANES,
        description="Train so many trials in one program on one chip: those of a built-in JAX training that differ in "
        "numbers such as learning rate and seed; each has its own chip if empty.",
    )
    pruner: Pruner | None = Field(
        default=None,
        description="Stop trials that fall behind at a segment border; none is stopped if empty.",
    )
    search_seed: int = Field(default=0, ge=0, lt=2**31, description="Which random points are drawn.")
    storage: str | None = Field(
        default=None,
        description="Database of the Optuna study: a URL such as postgresql://…, or env:VARIABLE of the flow if it has "
        "a password; a SQLite file of this machine if empty.",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _bayes(cls, value: Any) -> Any:
        return "tpe" if value == "bayes" else value

    @field_validator("seeds", mode="before")
    @classmethod
    def _number_of_seeds(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("seeds")
    @classmethod
    def _different_seeds(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("a seed stands there twice")
        return value

    @field_validator("parameters", mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return _flattened(value) if isinstance(value, dict) else value

    @field_validator("storage")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and ":" in value.partition("://")[2].rpartition("@")[0]:
            raise ValueError(
                "a password would be recorded: write env:VARIABLE, and the URL into that variable"
            )
        return value

    @model_validator(mode="after")
    def _possible(self) -> Search:
        if not self.parameters and not self.seeds:
            raise ValueError("the space is empty: give `parameters`, or `seeds`")
        seen: list[str] = []
        for name, parameter in self.parameters.items():
            for other in parameter.when or ():
                if other not in seen:
                    raise ValueError(f"{name}: `when` names {other}, which is no parameter above it")
            seen.append(name)
        if self.method == "grid":
            if unlisted := grid.not_listed(self.parameters):
                raise ValueError(f"{unlisted[0]}: a grid needs `values`, or whole numbers from min to max")
        elif self.trials is None:
            raise ValueError(f"{self.method} has no end of its own: say how many runs, such as trials: 50")
        if self.pack is not None and self.at_once is not None and self.at_once < self.pack:
            raise ValueError(
                f"at_once: {self.at_once} trial(s) at once cannot be {self.pack} to a program: give at least as "
                "many as pack, or leave pack out"
            )
        if (number := self.runs) > MOST_TRIALS:
            raise ValueError(
                f"there are {number:,} runs, and a sweep has at most {MOST_TRIALS:,}: set trials, or method: random"
            )
        return self

    @property
    def seeds_a_point(self) -> int:
        return max(1, len(self.seeds))

    @property
    def runs(self) -> int:
        """How many runs there are at most."""
        if self.method != "grid":
            assert self.trials is not None
            return self.trials
        whole = grid.count(self.parameters) * self.seeds_a_point
        return whole if self.trials is None else min(whole, self.trials)


@dataclass(frozen=True)
class Sweep:
    """A sweep file that has been read. `run.name` is the sweep's name; `notes` say what had no effect."""

    run: RunConfig
    search: Search
    notes: tuple[str, ...] = ()


def parse_sweep(values: object, name: str, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Check a sweep; `name` is its own if it has none, `changes` are dotted fields such as `run.steps`.

    Raises:
        SweepError, RunConfigError: one line for each wrong field.
    """
    if not isinstance(values, dict):
        raise SweepError("a sweep is a mapping of fields such as `run:` and `parameters:`")
    values = copy.deepcopy(values)
    apply_changes(values, dict(changes or {}))
    notes = [f"{key} has no effect: {_WITHOUT_EFFECT[key]}" for key in _WITHOUT_EFFECT if key in values]
    values = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}
    run = values.pop("run", None)
    program, command, own_name = (values.pop(key, None) for key in ("program", "command", "name"))
    run_cap = values.pop("run_cap", None)
    if run_cap is not None:
        values.setdefault("trials", run_cap)
    if isinstance(metric := values.get("metric"), dict) and "target" in metric:
        notes.append("metric.target has no effect: the sweep goes on to its last trial")
        values["metric"] = {key: value for key, value in metric.items() if key != "target"}
    if run is not None and not isinstance(run, dict):
        raise SweepError("run: a run configuration, as for flows.train")
    base: dict[str, Any] = dict(run or {})
    if program is not None or command is not None:
        if "command" in base or "training" in base:
            raise SweepError("give `program` (as Weights & Biases has it) or a program in `run`, not both")
        base["command"] = program_words(program, command)
    if not base:
        raise SweepError("run: missing; a run configuration, or `program` as Weights & Biases has it")
    base.setdefault("name", own_name or name)
    run_config = parse_run_config(base)
    if (wanted := values.pop("early_terminate", None)) is not None:
        values["pruner"] = _pruner_of_wandb(wanted, values, run_config, notes)
    sweep = Sweep(run_config, parse_search(values), tuple(notes))
    check_sweep(sweep.run, sweep.search)
    return sweep


def _pruner_of_wandb(
    wanted: Any, values: Mapping[str, Any], run: RunConfig, notes: list[str]
) -> Mapping[str, Any]:
    if "pruner" in values:
        raise SweepError("give `early_terminate` (as Weights & Biases has it) or `pruner`, not both")
    if run.commits:
        raise SweepError(
            "early_terminate counts logged values, and this run is stopped at its checkpoints, by steps: write "
            "pruner: {type: successive-halving, min_resource: STEPS}"
        )
    try:
        pruner = of_wandb(wanted)
    except PrunerError as error:
        raise SweepError(str(error)) from None
    notes.append("early_terminate is " + ", ".join(f"{name} {value}" for name, value in pruner.items()))
    return pruner


def parse_search(values: Mapping[str, Any]) -> Search:
    """Raises SweepError, one line for each wrong field."""
    try:
        return Search.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path: tuple[int | str, ...] = problem["loc"]
            where = ".".join(map(str, path)) or "sweep"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                known = [*Search.model_fields, "run", "program", "command", "name"]
                known = list(Parameter.model_fields) if len(path) > 1 else known
                near = get_close_matches(where.rpartition(".")[2], known, 1)
                message = (
                    f"there is no such field; there {'is' if near else 'are'} {', '.join(near or known)}"
                )
            found = (
                ""
                if problem["type"] in ("missing", "value_error", "extra_forbidden")
                else f" (found {problem['input']!r})"
            )
            lines.append(f"{where}: {message}{found}")
        raise SweepError("\n".join(lines)) from None


def check_sweep(run: RunConfig, search: Search) -> None:
    """Refuse now what a trial would be refused for later: each value that is at hand is tried in the run.

    Raises:
        SweepError: one sentence.
    """
    if len(run.name) > NAME_LENGTH:
        raise SweepError(
            f"run.name: a sweep's name has at most {NAME_LENGTH} characters, since its trials' are longer; "
            f"found {run.name}"
        )
    if run.mode is not None:
        raise SweepError("run.mode: a trial of a sweep trains on one slice; leave mode and slices out")
    own_seed = "training.seed" if run.training is not None else "seed"
    for name, why in (
        ("name", "a trial's name comes of its parameters"),
        (own_seed if search.seeds else "", "`seeds` says it, too"),
    ):
        if name and name in search.parameters and not (run.command and takes_arguments(run.command)):
            raise SweepError(f"parameters: {name} cannot be one: {why}")
    tried: list[RunConfig] = []
    for point in _test_points(search):
        try:
            tried.append(trial_run(run, point, (search.seeds or [None])[0]))
        except RunConfigError as error:
            field = str(error).splitlines()[0]
            hint = ""
            if "no such field" in field and run.command is not None and not takes_arguments(run.command):
                hint = "; to hand parameters to the program, write ${args} into its command"
            raise SweepError(f"parameters: {field}{hint}") from None
    if search.metric.figure is not None:
        _check_figure(run, search)
    else:
        _check_metric(run, search)
    if search.pack is not None:
        try:
            varied = [
                name
                for name, one in search.parameters.items()
                if one.when or one.choices is None or len(one.choices) > 1
            ]
            check_packable(run, varied, tried)
        except PackError as error:
            raise SweepError(str(error)) from None
    if search.pruner is not None:
        try:
            for_trials(search.pruner, run, search.runs)
        except PrunerError as error:
            raise SweepError(f"pruner.{error}") from None


def _check_metric(run: RunConfig, search: Search) -> None:
    """What a built-in training logs is known before anything is made."""
    if run.training is None:
        return
    logged = _LOGGED[run.training.workload.kind]
    if search.metric.name not in logged:
        raise SweepError(
            f"metric.name: {run.training.workload.kind} never logs {search.metric.name!r}; it logs {', '.join(logged)}"
        )


def _check_figure(run: RunConfig, search: Search) -> None:
    """Refuse an evaluation's figure that no trial can have."""
    metric = search.metric
    if search.pruner is not None:
        raise SweepError(
            f"pruner: trials are pruned by what they log on their way, and {metric.name} is known only at their end: "
            "name a logged metric, or no pruner"
        )
    if metric.value != "last":
        raise SweepError(
            f"metric.value: only the last checkpoint is evaluated, so {metric.name} has one value: leave it out"
        )
    for point in _test_points(search):
        trial = trial_run(run, point, (search.seeds or [None])[0])
        if not trial.evaluates(trial.steps):
            wanted = (
                "this run saves by its own means, so there is no checkpoint of ours to evaluate"
                if not trial.commits
                else "evaluate: never forbids it"
                if trial.evaluate == "never"
                else "a program of your own needs an evaluate_command for it"
            )
            raise SweepError(f"metric.name: {metric.name} wants an evaluation, and {wanted}")
        known = known_figures(trial)
        if known is not None and metric.figure not in known:
            near = get_close_matches(metric.figure or "", known, 1) or known
            kind = trial.training.workload.kind if trial.training else trial.name
            raise SweepError(
                f"metric.name: the evaluation of {kind} has no {metric.figure!r}{_where_told(point)}; it has "
                f"{', '.join(near)}"
            )


def _where_told(point: Mapping[str, Any]) -> str:
    return f" with {', '.join(f'{name}={value}' for name, value in point.items())}" if point else ""


def _test_points(search: Search) -> list[dict[str, Any]]:
    """Points in which each value that can be listed shortly stands once."""
    wanted: list[tuple[str | None, Any]] = [(None, None)]
    wanted += [(name, value) for name, parameter in search.parameters.items() for value in parameter.samples]
    found = []
    for name, value in wanted:
        fixed = _with_parents(search, name) if name is not None else {}
        point: dict[str, Any] = {}
        for one, parameter in search.parameters.items():
            if parameter.applies(point):
                point[one] = value if one == name else fixed.get(one, parameter.samples[0])
        found.append(point)
    return found


def _with_parents(search: Search, name: str) -> dict[str, Any]:
    """Values of those that a parameter depends on with which it applies."""
    found: dict[str, Any] = {}
    for parent, value in (search.parameters[name].when or {}).items():
        found |= _with_parents(search, parent) | {parent: value[0] if isinstance(value, list) else value}
    return found


def _flattened(parameters: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Weights & Biases nests parameters in parameters; here their names are joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict) and isinstance(inner := value.get("parameters"), dict):
            flat |= _flattened(inner, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat


def load_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file.

    Raises:
        SweepError, RunConfigError: it cannot be read, or a field is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise SweepError(f"{path} is not YAML: {error}") from None
    try:
        return parse_sweep(values, path.stem, changes)
    except (SweepError, RunConfigError) as error:
        lines = "\n".join(f"  {line}" for line in str(error).splitlines())
        raise SweepError(f"{path}:\n{lines}") from None


def places_of(run: RunConfig) -> int:
    """How many trials, or packs of them, one slice has room for, by the first of its types."""
    if run.slice.chips is None:
        return 1
    return accelerator_type(run.slice.choices[0].accelerator_type).chips // run.slice.chips
