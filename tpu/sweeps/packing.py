"""Which trials may train together in one program (`pack: k`), and the run that is their pack. Pure.

A pack is a run that holds chip and gang and commits nothing itself; its trials stay runs of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpu.runs.config import RunConfig, differences, parse_run_config
from tpu.runs.launch import PACK_TRAINER, keep_rule
from tpu.runs.record import RunRecord
from tpu.sweeps.trial import Trial
from tpu.topology import accelerator_type
from tpu.train.packs import NUMBERS, Member, PackError, in_common

# What trials of a pack may differ in, as fields of a run.
FIELDS = ("steps", *(f"training.{'.'.join(path)}" for path in NUMBERS))


def check_packable(run: RunConfig, parameters: Iterable[str], trials: Iterable[RunConfig]) -> None:
    """Refuse a sweep that cannot be packed; `trials` have each value of the space once.

    Raises:
        PackError: one sentence, which begins with the field.
    """
    if run.training is None:
        raise PackError(
            "pack: only the built-in JAX trainings train several trials in one program; leave pack out for a "
            "program of your own"
        )
    if run.framework != "jax":
        raise PackError(
            f"pack: only framework jax trains several trials in one program; found {run.framework}: leave pack out"
        )
    if (chips := _most_chips(run)) > 1:
        raise PackError(
            f"pack: the trials of a pack share one chip; found {chips} a trial: set run.slice.chips: 1"
        )
    for name in parameters:
        if name not in FIELDS:
            raise PackError(
                f"parameters: {name} cannot differ within a pack, which is one program: trials of one may differ in "
                f"{', '.join(FIELDS)}; leave pack out, or make a sweep of each value"
            )
    check_together(trials)


def check_together(trials: Iterable[RunConfig]) -> None:
    """Raises PackError, which names the field, if one of these trials of a sweep needs a program of its own."""
    first: dict[str, Any] | None = None
    for trial in trials:
        assert trial.training is not None
        common = in_common(trial.training)
        first = common if first is None else first
        if changed := differences(first, common, "training"):
            raise PackError(
                f"parameters: {changed[0].partition(':')[0]} is null in one trial and a number in another, which are "
                "two programs: leave pack out, or make a sweep of each"
            )


def _most_chips(run: RunConfig) -> int:
    if run.slice.chips is not None:
        return run.slice.chips
    return max(accelerator_type(name).chips for name in run.slice.types)


def pack_name(sweep: str, number: int) -> str:
    """As long as the names of trials."""
    return f"{sweep}-pack{number:04}"


def pack_run(base: RunConfig, number: int, trials: Sequence[RunConfig]) -> RunConfig:
    """The run of a pack, which holds the chip. `base.name` is the sweep's."""
    values = base.model_dump(mode="json")
    values |= {
        "name": pack_name(base.name, number),
        "training": None,
        "command": ["python", *PACK_TRAINER],
        "steps": max(trial.steps for trial in trials),
        "checkpoints": {},
        "evaluate": "never",
        "tracking": {},
        "max_cost": None,  # each trial is held to its own
    }
    return parse_run_config(values)


def member_of(record: RunRecord, run_dir: str) -> Member:
    """What the pack's program is told of a run, as long as no attempt of it is open."""
    config = record.config
    assert config.training is not None
    return Member(
        name=config.name,
        run_dir=run_dir,
        attempt=None,
        stop_steps=record.segments,
        last_step=config.steps,
        training=config.training,
        data_sha256=record.data_sha256,
        keep=keep_rule(config.checkpoints),
        allow_mixed=config.allow_mixed,
    )


def together(trials: Iterable[Trial], pack: int | None) -> list[Trial]:
    """All trials of a pack by lane."""
    return sorted((one for one in trials if one.pack == pack), key=lambda one: one.number)


def packs_of(sweep: str, trials: Iterable[Trial]) -> list[str]:
    """The runs that are the packs of these trials, each once."""
    return list(dict.fromkeys(pack_name(sweep, one.pack) for one in trials if one.pack is not None))


def runs_of(sweep: str, trials: Sequence[Trial]) -> list[str]:
    """All runs that are to be ended with these trials, in order: a pack first, whose gang saves the work of all."""
    return [*packs_of(sweep, trials), *(trial.run for trial in trials)]
