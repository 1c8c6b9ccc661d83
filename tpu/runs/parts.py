"""The runs of the slices of an elastic run: each holds a slice and its gang, and commits nothing.

The run NAME has checkpoints, metrics, report and evaluation. Its slices' parts are NAME-slice0 and so on: ordinary runs
with leases, candidates, budgets, verdicts, history and ledger of their own, whose program takes part in NAME. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpu.runs.config import Elastic, RunConfig, parse_run_config
from tpu.runs.record import RunRecord, code_url

# What a gang that others wait for in vain is given up after must be well before these take a wait for a hang.
STUCK_SHARE = 0.25


@dataclass(frozen=True)
class Part:
    """What the program of slice `number` is told of the run that it takes part in, whose record this is.

    `others` says whether another slice trains: then nothing is lost with this one.
    """

    record: RunRecord
    run_dir: str
    number: int
    others: Callable[[], bool] = lambda: False

    @property
    def name(self) -> str:
        return part_name(self.record.config.name, self.number)


def part_name(run: str, number: int) -> str:
    """The run of one slice's part."""
    return f"{run}-{slice_name(number)}"


def slice_name(number: int) -> str:
    """As people read it, and as the members know each other."""
    return f"slice{number}"


def part_names(config: RunConfig) -> list[str]:
    """All runs that are parts of one; none if it has no mode."""
    return [] if config.mode != "elastic" else [part_name(config.name, n) for n in range(config.slices)]


def part_config(record: RunRecord, run_dir: str, number: int) -> RunConfig:
    """The configuration of a slice's part: the run's own, without what the run does itself. All have its code."""
    values = record.config.model_dump(mode="json")
    values |= {
        "name": part_name(record.config.name, number),
        "training": None,
        "command": record.config.command or ["python", "-m", "tpu.train.elastic_trainer"],
        "contract": False,
        "seed": record.config.training.seed if record.config.training else record.config.seed,
        "slices": 1,
        "mode": None,
        "elastic": None,
        "checkpoints": {},
        "evaluate": "never",
        "tracking": {},
        "evaluate_command": None,
        "max_cost": None,  # the run is held to it, for all of its slices
        "code": code_url(run_dir, record.code),
    }
    return parse_run_config(values)


def role_of(part: Part, node: str) -> dict[str, Any]:
    """What tpu.elastic.part.Role wants to know."""
    config = part.record.config
    settings = config.elastic or Elastic()
    return {
        "name": slice_name(part.number),
        "names": [slice_name(number) for number in range(config.slices)],
        "node": node,
        "units": settings.units,
        "unit_devices": settings.unit_devices,
        "least": settings.least_slices,
        "wait_s": settings.wait_minutes * 60,
        "stuck_s": min(settings.stuck_seconds, STUCK_SHARE * config.progress_minutes * 60),
        "hash_every": settings.compare_every,
        "log_every": config.training.log_every if config.training else 1,
    }
