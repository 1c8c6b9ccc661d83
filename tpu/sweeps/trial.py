"""A trial: one point of a sweep's space, with one seed, as a run of its own. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpu.runs.config import RunConfig, apply_changes, parse_run_config
from tpu.sweeps.parameters import canonical
from tpu.sweeps.program import takes_arguments, with_arguments

# Of the 40 characters of a run's name a trial needs some to tell it from the others.
MARK_LENGTH = 8
NAME_LENGTH = 40 - MARK_LENGTH - 1


class MalformedTrial(ValueError):
    """The record of a trial cannot be read; the message shows what it holds."""


@dataclass(frozen=True)
class Trial:
    """`number` counts the trials of a sweep, `point` the points of its space, which differ from each other.

    `added` counts the points that people have added to the sweep; None if it was drawn. `pack` counts the packs: trials
    with the same one train in one program, by lane in order of their numbers.
    """

    number: int
    point: int
    parameters: Mapping[str, Any]
    seed: int | None
    run: str
    added: int | None = None
    pack: int | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Trial:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise MalformedTrial(
                f"the record of a trial cannot be understood ({error!r}): {data[:200]!r}"
            ) from error


def trial_name(sweep: str, parameters: Mapping[str, Any], seed: int | None) -> str:
    """The name of a trial's run: the same parameters in a sweep of the same name are the same run."""
    text = f"{sweep}\n{canonical(parameters)}\n{seed}"
    return f"{sweep}-{hashlib.sha256(text.encode()).hexdigest()[:MARK_LENGTH]}"


def trial_run(base: RunConfig, parameters: Mapping[str, Any], seed: int | None) -> RunConfig:
    """The run of a trial: the base run with the point's values in it. `base.name` is the sweep's.

    Raises:
        tpu.runs.config.RunConfigError: there is no such field, or a value cannot be.
    """
    values = base.model_dump(mode="json")
    if base.command is not None and takes_arguments(base.command):
        values["command"] = with_arguments(base.command, parameters)
    else:
        apply_changes(values, dict(parameters))
    if seed is not None:
        apply_changes(values, {"training.seed" if base.training is not None else "seed": seed})
    values["name"] = trial_name(base.name, parameters, seed)
    return parse_run_config(values)
