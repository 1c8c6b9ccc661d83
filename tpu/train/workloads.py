"""From a run's configuration to its workload: what is trained, on which data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tpu.train.bytelm import ByteLmWorkload
from tpu.train.icl import IclWorkload
from tpu.train.settings import Icl, Training


@dataclass(frozen=True)
class Configuration:
    """The `training` section of a run and the hash of its text (None: no text, or no hash recorded)."""

    training: Training
    data_sha256: str | None

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Configuration:
        """From the values of a program's config.json: a Training's fields and perhaps `data_sha256`.

        Raises pydantic's ValidationError, which names the wrong field.
        """
        values = dict(values)
        data_sha256 = values.pop("data_sha256", None)
        return cls(Training.model_validate(values), data_sha256)

    @classmethod
    def from_run_record(cls, run_json: bytes) -> Configuration:
        """From the content of a run's run.json. Raises ValueError if the run has no built-in training."""
        record = json.loads(run_json)
        training = record["config"].get("training")
        if training is None:
            raise ValueError(
                f"the run {record['config'].get('name')} runs a command of its own, which the built-in evaluator "
                "does not know: set `evaluate_command` to evaluate it"
            )
        return cls(Training.model_validate(training), record.get("data_sha256"))


def make_workload(configuration: Configuration) -> IclWorkload | ByteLmWorkload:
    """The workload of a configuration."""
    training = configuration.training
    if isinstance(training.workload, Icl):
        return IclWorkload(training.workload, training.seed)
    return ByteLmWorkload(training.workload, training.seed, configuration.data_sha256)
