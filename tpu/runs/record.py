"""run.json: what a run is, written once when it is created; extending and forking record their parent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tpu.checkpoint import files, objects
from tpu.checkpoint.fence import Fence, load_fence
from tpu.runs.code import Bundle
from tpu.runs.config import RunConfig, configuration_hash, differences, parse_run_config
from tpu.runs.plan import stop_steps
from tpu.slices.names import short_uid
from tpu.train.text import text_sha256


class RunNameTaken(ValueError):
    """A run of this name exists with another configuration; the message shows the difference."""


class RunNotFound(LookupError):
    """There is no such run in the bucket."""


class MalformedRecord(ValueError):
    """run.json cannot be read; the message shows what it holds."""


class TooFewSteps(ValueError):
    """An extension or a fork must end behind where it begins; the message says how far that is."""


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json.

    `code` names the program's source and its content hash. `parent` is None, or what the run was forked from: `run`,
    `step`, and `hash`, that of the parent's configuration. `extensions` lists (from_steps, to_steps) in order.
    `members` are the runs that a pack trains in its one program, by lane; a run that is no pack has none. `part_of` is
    the run in which a slice's part takes part.
    """

    config: RunConfig
    data_sha256: str | None
    code: dict[str, str]
    created: float
    parent: dict[str, Any] | None = None
    extensions: tuple[tuple[int, int], ...] = ()
    members: tuple[str, ...] = ()
    part_of: str = ""

    @property
    def hash(self) -> str:
        """Of all that the run's numbers depend on. A fork has another one than a run with its settings from step 0."""
        numbers = self.config.numbers(self.data_sha256)
        if self.parent is not None:
            numbers["forked_from"] = {"hash": self.parent["hash"], "step": self.parent["step"]}
        if self.members:
            numbers["members"] = self.members
        return configuration_hash(numbers)

    @property
    def uid(self) -> str:
        """Tells this run from all others, also from an earlier one of the same name."""
        return short_uid(self.config.name, f"{self.created}")

    @property
    def first_step(self) -> int:
        """Where the run begins: 0, or the step of the parent's checkpoint."""
        return self.parent["step"] if self.parent else 0

    @property
    def segments(self) -> tuple[int, ...]:
        """Stop steps of the segments, ascending. An extension adds some behind the old end and moves none."""
        totals = [self.extensions[0][0] if self.extensions else self.config.steps]
        totals += [to for _, to in self.extensions]
        if not self.config.commits:
            return (totals[-1],)
        rule = self.config.checkpoints
        stops = set(stop_steps(rule, totals[0]))
        if rule.every is None and rule.at is None and rule.log_spaced is None:
            rule = rule.model_copy(update={"every": min(stops)})
        for before, total in pairwise(totals):
            stops |= {step for step in stop_steps(rule, total) if step > before}
        return tuple(sorted(step for step in stops if step > self.first_step))

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "format": 1,
                "name": self.config.name,
                "hash": self.hash,
                "created": self.created,
                "config": self.config.model_dump(mode="json"),
                "data_sha256": self.data_sha256,
                "code": self.code,
                "parent": self.parent,
                "extensions": [list(pair) for pair in self.extensions],
                "members": list(self.members),
                "part_of": self.part_of,
            },
            indent=1,
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunRecord:
        try:
            values = json.loads(data)
            return cls(
                config=parse_run_config(values["config"]),
                data_sha256=values["data_sha256"],
                code=values["code"],
                created=values["created"],
                parent=values["parent"],
                extensions=tuple((a, b) for a, b in values["extensions"]),
                members=tuple(values.get("members", ())),
                part_of=values.get("part_of", ""),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedRecord(f"run.json cannot be understood ({error!r}): {data[:200]!r}") from error


def data_hash(config: RunConfig) -> str | None:
    """SHA-256 of the text that a run trains on, so that changed data is noticed; None if it draws its data.

    Raises:
        tpu.train.text.TextNotFoundError: there is no such text.
    """
    if config.training is None or config.training.workload.kind != "bytelm":
        return None
    return text_sha256(list(config.training.workload.text))


def run_directory(bucket: str, name: str) -> str:
    """`gs://…/runs/<name>`."""
    return f"{bucket}/runs/{name}"


def bucket_of(run_dir: str) -> str:
    """The bucket of a `run_directory`."""
    return run_dir.partition("/runs/")[0]


def code_url(run_dir: str, code: Mapping[str, str]) -> str:
    """Where the bundle of a record's `code` lies: by its hash, so that two creators never overwrite each other's."""
    return f"{run_dir}/code/{code['sha256']}.tar.gz"


def load_record(run_dir: str) -> RunRecord:
    """Read run.json.

    Raises:
        RunNotFound: there is none.
    """
    found = objects.read(f"{run_dir}/run.json")
    if found is None:
        raise RunNotFound(_not_found(run_dir))
    return RunRecord.from_json(found[0])


def _not_found(run_dir: str) -> str:
    bucket, _, name = run_dir.partition("/runs/")
    return (
        f"there is no run {name} in {bucket}; `relay runs` lists those that are, and one that was just started is "
        "among them once its flow has begun"
    )


def create_or_take_up(run_dir: str, record: RunRecord) -> RunRecord:
    """Create the run; if it exists with the same numbers, the record that stands there is the answer.

    Raises:
        RunNameTaken: the name belongs to a run whose parameters would differ.
    """
    try:
        objects.create_exclusive(f"{run_dir}/run.json", record.to_json())
    except objects.ObjectExists:
        existing = load_record(run_dir)
        check_same(existing, record)
        return existing
    return record


def check_same(existing: RunRecord, wanted: RunRecord) -> None:
    """Raises RunNameTaken, with the difference, if a run would not compute what the existing one does."""
    name = wanted.config.name
    changed = differences(
        existing.config.numbers(existing.data_sha256), wanted.config.numbers(wanted.data_sha256)
    )
    if changed:
        raise RunNameTaken(
            f"the run {name} exists with another configuration; nothing was changed. Choose another name, or fork it.\n"
            + "\n".join(f"  {line}" for line in changed)
        )
    if existing.members != wanted.members:
        trains = f"trains {', '.join(existing.members)} together" if existing.members else "is no pack"
        raise RunNameTaken(
            f"the run {name} {trains}; nothing was changed. Packs are started by their sweep alone"
        )
    if existing.part_of != wanted.part_of:
        what = f"is a slice's part of {existing.part_of}" if existing.part_of else "is no part of another one"
        raise RunNameTaken(
            f"the run {name} {what}; nothing was changed. Parts are started by their run alone"
        )
    if existing.config.steps != wanted.config.steps:
        longer = wanted.config.steps > existing.config.steps
        raise RunNameTaken(
            f"the run {name} has {existing.config.steps} steps, not {wanted.config.steps}; nothing was changed. "
            + (
                f"To go on further: relay extend {name} --steps {wanted.config.steps}"
                if longer
                else f"To go on with it: --resume {name}"
            )
        )
    if existing.config.max_cost != wanted.config.max_cost:
        found, asked = (_limit(one.config.max_cost) for one in (existing, wanted))
        raise RunNameTaken(
            f"the run {name} has {found}, not {asked}; nothing was changed. To change it: relay extend {name} "
            f"--max-cost {wanted.config.max_cost or 'none'}. To go on with it: --resume {name}"
        )


def never_began(record: RunRecord, fence: Fence) -> bool:
    """Whether no gang of the run was ever started: its name stands for no numbers yet."""
    return record.parent is None and not record.extensions and not fence.attempt and not fence.commits


def check_startable(run_dir: str, existing: RunRecord, wanted: RunRecord) -> None:
    """Raises RunNameTaken if the run would not compute what the existing one does, and that one has begun."""
    if not never_began(existing, load_fence(run_dir)):
        check_same(existing, wanted)


def correct(run_dir: str, wanted: RunRecord) -> tuple[RunRecord, list[str]]:
    """Give a run that never began another configuration: the record that counts now, and what changed in it.

    Only its controller may call this, so that nobody starts a gang meanwhile.

    Raises:
        RunNameTaken: it has begun, and would compute something else.
        tpu.checkpoint.objects.StaleGeneration: somebody changed the record meanwhile; try again.
    """
    existing, generation = _with_generation(run_dir)
    if not never_began(existing, load_fence(run_dir)):
        check_same(existing, wanted)
        return existing, []
    # The time stays: by it the run is told from others, also in the labels of a slice that it may have asked for.
    changed = replace(wanted, created=existing.created)
    objects.compare_and_set(f"{run_dir}/run.json", changed.to_json(), generation)
    before, now = (one.config.model_dump(mode="json") for one in (existing, changed))
    return changed, differences(before, now)


def _limit(max_cost: float | None) -> str:
    return "no max_cost" if max_cost is None else f"a max_cost of ${max_cost:,.2f}"


def renew_code(run_dir: str, code: Bundle) -> None:
    """Let the next attempt of a run have this code. Which one an attempt had stands in its events.

    Raises:
        RunNotFound: there is no such run.
        tpu.checkpoint.objects.StaleGeneration: somebody changed the record meanwhile; try again.
    """
    record, generation = _with_generation(run_dir)
    if record.code["sha256"] == code.sha256:
        return
    named = {"source": code.source, "sha256": code.sha256}
    files.write(code_url(run_dir, named), code.data)  # before the record names it
    objects.compare_and_set(f"{run_dir}/run.json", replace(record, code=named).to_json(), generation)


def set_max_cost(run_dir: str, max_cost: float | None) -> RunRecord:
    """Let a run spend more, or less, from its next start on; None is without limit.

    Raises:
        tpu.runs.config.RunConfigError: not above 0, or the run's slices have no price.
        RunNotFound: there is no such run.
        tpu.checkpoint.objects.StaleGeneration: somebody changed the record meanwhile; try again.
    """
    record, generation = _with_generation(run_dir)
    values = record.config.model_dump(mode="json") | {"max_cost": max_cost}
    changed = replace(record, config=parse_run_config(values))
    objects.compare_and_set(f"{run_dir}/run.json", changed.to_json(), generation)
    return changed


def _with_generation(run_dir: str) -> tuple[RunRecord, int]:
    found = objects.read(f"{run_dir}/run.json")
    if found is None:
        raise RunNotFound(_not_found(run_dir))
    return RunRecord.from_json(found[0]), found[1]


def extend(run_dir: str, steps: int) -> RunRecord:
    """Let a run go on to more steps; its schedule and everything else stay.

    Raises:
        TooFewSteps: `steps` is not more than the run has.
        RunNotFound: there is no such run.
        tpu.checkpoint.objects.StaleGeneration: somebody changed the record meanwhile; try again.
    """
    record, generation = _with_generation(run_dir)
    before = record.config.steps
    if steps <= before:
        raise TooFewSteps(f"{record.config.name} has {before} steps already; give more than that")
    longer = replace(
        record,
        config=parse_run_config(record.config.model_dump(mode="json") | {"steps": steps}),
        extensions=(*record.extensions, (before, steps)),
    )
    objects.compare_and_set(f"{run_dir}/run.json", longer.to_json(), generation)
    return longer
