"""Packs: several runs of the built-in JAX trainer in one process, a lane each.

Which runs may be together, and what the program of a pack is told. Without JAX, since a sweep asks, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu.checkpoint.keep import KeepRule
from tpu.runtime.plan import Plan
from tpu.train.settings import Icl, Training

# A lane more costs memory and a longer call; beyond this nobody gains by it.
MOST_LANES = 64

# In these the members of a pack may differ; all else is part of the one program that is compiled for them.
NUMBERS = (
    ("seed",),
    ("schedule_steps",),
    ("optimizer", "learning_rate"),
    ("optimizer", "warmup_fraction"),
    ("optimizer", "weight_decay"),
    ("optimizer", "clip_norm"),
    ("workload", "tasks"),
)


class PackError(ValueError):
    """Runs cannot be packed together; the message says why, and what to do."""


def in_common(training: Training) -> dict[str, Any]:
    """What all members of a pack have in common with this one. A number that is not set (null) is another program.

    Raises:
        PackError: it can be in no pack.
    """
    if training.shard_parameters:
        raise PackError(
            "training.shard_parameters: the runs of a pack are whole on one chip; pack without it"
        )
    values = training.model_dump(mode="json")
    for *parents, leaf in NUMBERS:
        part = values
        for parent in parents:
            part = part[parent]
        if part.get(leaf) is not None:
            part[leaf] = "a number"
    return values


@dataclass(frozen=True)
class Member:
    """One run of a pack, as its program is told of it. `attempt` is None if the run takes no part any more: its lane
    stays empty, so that the others keep theirs."""

    name: str
    run_dir: str
    attempt: int | None
    stop_steps: tuple[int, ...]
    last_step: int
    training: Training
    data_sha256: str | None = None
    keep: str = ""
    allow_mixed: bool = False

    def plan(self, events: Path | None) -> Plan:
        """Its part of the segment contract; what happens to it goes to the file `events`, under its name."""
        assert self.attempt is not None
        return Plan(
            run_dir=self.run_dir,
            attempt=self.attempt,
            stop_steps=tuple(sorted({*self.stop_steps, self.last_step})),
            last_step=self.last_step,
            seed=self.training.seed,
            events_path=events,
            allow_mixed=self.allow_mixed,
            keep=KeepRule.from_json(self.keep),
            member=self.name,
        )

    def to_values(self) -> dict[str, Any]:
        return {**vars(self), "training": self.training.model_dump(mode="json")}


def members_of(values: Mapping[str, Any]) -> list[Member]:
    """The members that the config.json of a pack tells of, by lane.

    Raises:
        PackError: they cannot be in one pack.
        pydantic.ValidationError: a training cannot be.
    """
    members = [
        Member(
            **{
                **one,
                "training": Training.model_validate(one["training"]),
                "stop_steps": tuple(one["stop_steps"]),
            }
        )
        for one in values.get("members", ())
    ]
    check_together(members)
    return members


def check_together(members: Sequence[Member]) -> None:
    """Raises PackError unless these can be in one pack."""
    if not 1 <= len(members) <= MOST_LANES:
        raise PackError(f"a pack has 1 to {MOST_LANES} runs, found {len(members)}")
    first = members[0]
    for other in members[1:]:
        if (in_common(other.training), other.data_sha256) != (in_common(first.training), first.data_sha256):
            raise PackError(
                f"{first.name} and {other.name} differ in more than "
                f"{', '.join('.'.join(path) for path in NUMBERS)}: they need programs of their own"
            )
    in_common(first.training)


def most_tasks(members: Sequence[Member]) -> int | None:
    """The longest list of tasks, to which those of the others are padded; None without tasks."""
    kinds = (member.training.workload for member in members)
    return max(
        (kind.tasks for kind in kinds if isinstance(kind, Icl) and kind.tasks is not None), default=None
    )
