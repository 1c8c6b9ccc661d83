"""Which figures of an evaluation trials may be compared by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu.runs.config import RunConfig
from tpu.train.settings import Icl

# Numbers of an answer that say what was evaluated, not how good it is.
_ABOUT = ("step", "attempt", "sequences", "bytes")
_PREDICTORS = ("zero_error", "ridge_error", "model_error", "delta_ridge", "model_loss")
_WITH_TASKS = (*_PREDICTORS, "dmmse_error", "delta_dmmse", "dmmse_to_ridge")
_BYTES = ("bits_per_byte", "byte_frequency_bits_per_byte", "uniform_bits_per_byte")


def flat_figures(answer: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """The numbers of an evaluator's answer; what is nested has dots, such as `new.delta_ridge`."""
    found: dict[str, float] = {}
    for name, value in answer.items():
        if isinstance(value, Mapping):
            found |= flat_figures(value, f"{before}{name}.")
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and (before or name not in _ABOUT)
        ):
            found[f"{before}{name}"] = float(value)
    return found


def known_figures(run: RunConfig) -> tuple[str, ...] | None:
    """The figures that a run's evaluator will give; None if it is a program of the user's own."""
    if run.training is None or run.evaluate_command is not None:
        return None
    workload = run.training.workload
    if not isinstance(workload, Icl):
        return _BYTES
    if workload.tasks is None:
        return tuple(f"new.{name}" for name in _PREDICTORS)
    return tuple(f"{where}.{name}" for where in ("pretraining", "new") for name in _WITH_TASKS)
