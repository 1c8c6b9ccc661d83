"""When a trial is stopped early: the settings of Optuna's pruners, and what of them cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpu.runs.config import RunConfig
from tpu.runs.plan import stop_steps
from tpu.train.form import plain_optionals

# Which fields each kind has; the names are Optuna's.
_FIELDS = {
    "median": ("n_startup_trials", "n_warmup_steps", "n_min_trials"),
    "successive-halving": ("min_resource", "max_resource", "reduction_factor"),
    "hyperband": ("min_resource", "max_resource", "reduction_factor"),
}


class PrunerError(ValueError):
    """A pruner cannot be; the message says which field, and what to write."""


class Pruner(BaseModel):
    """Trials that fall behind are stopped at a segment border; a step is one unit of resource.

    A program without checkpoints of ours has no borders: each value that it logs is one unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)

    type: Literal["median", "successive-halving", "hyperband"] = Field(
        description="Stop what is worse than the median of finished trials at the same step, or what is not among the "
        "best part of those that came so far."
    )
    n_startup_trials: int | None = Field(
        default=None,
        ge=1,
        description="median: nothing is stopped before so many have finished (5 if empty).",
    )
    n_warmup_steps: int | None = Field(
        default=None, ge=0, description="median: nothing is stopped before this step (0 if empty)."
    )
    n_min_trials: int | None = Field(
        default=None, ge=1, description="median: of so many a value at the same step is needed (1 if empty)."
    )
    min_resource: int | None = Field(
        default=None,
        ge=1,
        description="successive-halving, hyperband: the first rung; the first segment border if empty.",
    )
    max_resource: int | None = Field(
        default=None,
        ge=1,
        description="successive-halving, hyperband: from here on nothing is stopped; the last step if empty.",
    )
    reduction_factor: int | None = Field(
        default=None,
        ge=2,
        description="successive-halving, hyperband: one of so many goes on at each rung (3 if empty).",
    )

    @model_validator(mode="after")
    def _fields_of_its_kind(self) -> Pruner:
        own = _FIELDS[self.type]
        for name in self.model_fields_set - {"type"}:
            if getattr(self, name) is not None and name not in own:
                raise ValueError(f"{name} is no field of {self.type}, which has {', '.join(own)}")
        if self.min_resource and self.max_resource and self.min_resource >= self.max_resource:
            raise ValueError(
                f"min_resource {self.min_resource} is not below max_resource {self.max_resource}: nothing would ever "
                "be stopped"
            )
        return self

    @property
    def eta(self) -> int:
        """The reduction factor."""
        return self.reduction_factor or 3

    @property
    def startup_trials(self) -> int:
        return 5 if self.n_startup_trials is None else self.n_startup_trials


def for_trials(pruner: Pruner, run: RunConfig, runs: int) -> Pruner:
    """The pruner with its defaults filled in, for `runs` trials of this run.

    Raises:
        PrunerError: it could never stop a trial.
    """
    stops = stop_steps(run.checkpoints, run.steps) if run.commits else None
    # Of a program without checkpoints of ours it is not known how many values it will log.
    borders, last = (stops[:-1], run.steps) if stops is not None else (None, None)
    if borders is not None and not borders:
        raise PrunerError(
            "a trial is one segment, and is not stopped within: set run.checkpoints.every, such as a tenth of run.steps"
        )
    if pruner.type == "median":
        if pruner.startup_trials >= runs:
            raise PrunerError(
                f"n_startup_trials: nothing is stopped before {pruner.startup_trials} trials have finished, and there "
                f"are {runs} in all: write fewer"
            )
        _before_the_end("n_warmup_steps", pruner.n_warmup_steps or 0, borders)
        return pruner
    first = pruner.min_resource or (borders[0] if borders else None)
    if first is None:
        raise PrunerError(
            "min_resource: after how many logged values is a trial compared for the first time?"
        )
    most = pruner.max_resource or last
    if most is None and pruner.type == "hyperband":
        raise PrunerError(
            "max_resource: how many values does a trial log? hyperband makes its brackets of that"
        )
    _before_the_end("min_resource", first, borders)
    if most is not None and first >= most:
        raise PrunerError(
            f"min_resource: {first} is not below max_resource {most}: nothing would ever be stopped"
        )
    return pruner.model_copy(update={"min_resource": first, "max_resource": most})


def _before_the_end(field: str, value: int, borders: Sequence[int] | None) -> None:
    if borders is not None and value > borders[-1]:
        raise PrunerError(
            f"{field}: {value} is behind step {borders[-1]}, the last border at which a trial could be stopped"
        )


def of_wandb(values: Any) -> Mapping[str, Any]:
    """`early_terminate` of a Weights & Biases sweep file as the fields of a Pruner.

    Its bands are min_iter · eta^k, or max_iter / eta^k for k from s to 1; what is not in the best 1/eta of a band is
    stopped, which is what successive halving does without waiting. Iterations are logged values.

    Raises:
        PrunerError: what it asks for is not supported.
    """
    if not isinstance(values, dict) or values.get("type") != "hyperband":
        raise PrunerError(
            "early_terminate: Weights & Biases has {type: hyperband, min_iter: N}, or a `pruner` of ours"
        )
    known = ("type", "min_iter", "max_iter", "s", "eta", "strict")
    if unknown := [name for name in values if name not in known]:
        raise PrunerError(f"early_terminate: there is no field {unknown[0]}; there are {', '.join(known)}")
    if values.get("strict"):
        raise PrunerError("early_terminate: strict is not supported; leave it out")
    eta = _whole(values, "eta", 3)
    if ("min_iter" in values) == ("max_iter" in values):
        raise PrunerError("early_terminate: give min_iter, or max_iter with s")
    if "min_iter" in values:
        return {
            "type": "successive-halving",
            "min_resource": _whole(values, "min_iter", 1),
            "reduction_factor": eta,
        }
    most, bands = _whole(values, "max_iter", 1), _whole(values, "s", 0)
    first = most // eta**bands
    if not bands or not first:
        raise PrunerError(
            f"early_terminate: s says how many bands there are below max_iter {most}, each at 1/{eta} of the next; "
            f"found s: {values.get('s')}"
        )
    return {
        "type": "successive-halving",
        "min_resource": first,
        "max_resource": most,
        "reduction_factor": eta,
    }


def _whole(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PrunerError(f"early_terminate: {name} is a whole number, found {value!r}")
    return value
