"""The configuration of a run: what a researcher writes as YAML or fills into the form of the Prefect UI."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tpu.cloud.values import Provisioning
from tpu.runs.plan import CheckpointRule, stop_steps
from tpu.slices.candidate import ZONE_PATTERN, Candidate
from tpu.slices.pool_settings import NAME_PATTERN
from tpu.topology import accelerator_type
from tpu.train.form import form, plain_optionals
from tpu.train.settings import Training


class RunConfigError(ValueError):
    """A configuration cannot be used; the message names the field, what was found and what to write."""


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=plain_optionals
    )


def _known_type(value: str) -> str:
    return accelerator_type(value).name


def _zone_name(value: str) -> str:
    if not re.fullmatch(ZONE_PATTERN, value):
        raise ValueError(f"write a zone such as us-central2-b, found {value!r}")
    return value


_ZoneName = Annotated[str, AfterValidator(_zone_name)]
_TypeName = Annotated[str, AfterValidator(_known_type)]


class SliceCandidate(_Part):
    """Another way to get the slice. What is left out is as in `slice`."""

    zone: _ZoneName | None = Field(default=None, description="Zone to create it in.", examples=["us-east5-a"])
    accelerator_type: _TypeName | None = Field(default=None, description="TPU type as Google names it.")
    provisioning: Provisioning | None = Field(default=None, description="On what terms.")
    price_an_hour: float | None = Field(
        default=None,
        ge=0,
        description="US dollars an hour for the whole slice; that of `slice` if type and terms are the same.",
    )


# What the form of a run asks for; all else is the work pool's to say, or comes by `changes`.
_OF_SLICE = ("accelerator_type", "zone", "provisioning", "price_an_hour", "chips")
_OF_RUN = ("name", "steps", "slice", "max_cost", "training", "checkpoints", "code")


class Slice(_Part):
    """The TPU slice that a run trains on."""

    model_config = ConfigDict(json_schema_extra=form(_OF_SLICE, of_the_pool=_OF_SLICE))

    accelerator_type: _TypeName = Field(
        default="v4-8", description="TPU type as Google names it.", examples=["v4-8", "v5litepod-8"]
    )
    zone: _ZoneName = Field(
        default="us-central2-b", description="Zone to create it in.", examples=["us-central2-b"]
    )
    provisioning: Provisioning = Field(
        default="spot", description="Spot is cheapest and may be preempted at any time."
    )
    candidates: list[SliceCandidate] = Field(
        default=[],
        description="Ways to get the slice, tried in this order, each by what differs from the one described here, "
        'such as [{}, {"zone": "us-east5-a"}, {"provisioning": "on-demand", "price_an_hour": 12.88}]. Empty: that one.',
    )
    race: int = Field(
        default=1, ge=1, le=8, description="So many candidates are asked at once; the first ready one wins."
    )
    queue_minutes: float = Field(
        default=10,
        gt=0,
        description="With several candidates: wait so long in one zone's queue before the next one is tried.",
    )
    repair_minutes: float = Field(
        default=60,
        ge=0,
        description="An on-demand or reserved slice that is being repaired is waited for so long, then replaced.",
    )
    max_run_hours: float = Field(
        default=24, gt=0, le=168, description="Life of a flex-start slice; the other kinds have none."
    )
    allow_regions: list[str] = Field(
        default=[],
        description="Regions besides the bucket's own in which a slice may be; traffic between them costs money.",
        examples=[["us-east5"]],
    )
    runtime_version: str | None = Field(
        default=None,
        description="TPU VM image; the usual one of the type if empty.",
        examples=["tpu-ubuntu2204-base"],
    )
    network: str | None = Field(default=None, description="VPC network; the project's default if empty.")
    subnetwork: str | None = Field(default=None, description="Subnetwork of the network.")
    external_ips: bool = Field(default=True, description="Give hosts external addresses.")
    service_account: str | None = Field(
        default=None,
        description="Service account of the VMs; the default one if empty. It needs to write to the bucket.",
        examples=["trainer@my-project.iam.gserviceaccount.com"],
    )
    startup_script: str | None = Field(
        default=None, description="Shell script that runs as root at every boot."
    )
    price_an_hour: float | None = Field(
        default=None,
        ge=0,
        description="US dollars an hour for the whole slice. Without it costs are not known, and max_cost is refused.",
        examples=[5.16],
    )
    ready_minutes: float = Field(
        default=90, gt=0, description="Give up when no slice is ready after this many minutes."
    )
    chips: int | None = Field(
        default=None,
        description="So many chips of a slice with one host, shared with other runs: 1, 2, 4 or 8. Without it the "
        "whole slice.",
    )
    pool_hours: float = Field(
        default=168, gt=0, description="Give up when the pool had no place for so many hours."
    )

    @model_validator(mode="after")
    def _chips_of_one_host(self) -> Slice:
        for name in self.types if self.chips is not None else ():
            kind = accelerator_type(name)
            fits = [number for number in (1, 2, 4, 8) if number <= kind.chips]
            if kind.hosts > 1 or self.chips not in fits:
                offer = (
                    f"{', '.join(map(str, fits))} of its {kind.chips} chips" if kind.hosts == 1 else "no part"
                )
                raise ValueError(
                    f"chips: a run can have {offer} of a {name} ({kind.hosts} host(s)); found {self.chips}"
                )
        return self

    @property
    def choices(self) -> tuple[Candidate, ...]:
        """All ways to get the slice, in order, each once."""
        found: dict[str, Candidate] = {}
        for wanted in self.candidates or [SliceCandidate()]:
            choice = self._choice(wanted)
            found.setdefault(str(choice), choice)
        return tuple(found.values())

    def _choice(self, wanted: SliceCandidate) -> Candidate:
        kind = wanted.accelerator_type or self.accelerator_type
        terms = wanted.provisioning or self.provisioning
        price = wanted.price_an_hour
        # A price is that of a type on certain terms: what is guessed for another one would falsify the ledger.
        if price is None and (kind, terms) == (self.accelerator_type, self.provisioning):
            price = self.price_an_hour
        return Candidate(wanted.zone or self.zone, kind, terms, price)

    @property
    def types(self) -> tuple[str, ...]:
        """The accelerator types that the slice may have, each once, in order."""
        return tuple(dict.fromkeys(choice.accelerator_type for choice in self.choices))


class Environment(_Part):
    """Python and packages of the program on the hosts."""

    python: str = Field(default="3.11", pattern=r"^3\.\d+$", description="Python version, installed with uv.")
    requirements: str | None = Field(
        default=None,
        description="Requirements or lock file, relative to the code; the built-in trainers' own packages if empty.",
    )


class Budget(_Part):
    """How many times an attempt may end for each reason before the run gives up."""

    preemption: int | None = Field(default=None, ge=0, description="Preemptions; no limit if empty.")
    infrastructure: int = Field(default=20, ge=0, description="Failures of hosts, network or cloud.")
    user_failure: int = Field(default=2, ge=0, description="Failures of the program itself.")


class Wandb(_Part):
    """A run at Weights & Biases; the flow writes to it, the hosts need no key."""

    project: str = Field(min_length=1, description="Project at Weights & Biases.", examples=["icl"])
    entity: str | None = Field(default=None, description="User or team; the key's own if empty.")
    key: str | None = Field(
        default=None,
        description="Where the API key is: env:VARIABLE of the flow, or block:NAME of a Prefect Secret block. Without "
        "one the record is made offline and put into the bucket, for `wandb sync`.",
        examples=["block:wandb-key"],
    )

    @field_validator("key")
    @classmethod
    def _source(cls, value: str | None) -> str | None:
        kind, _, target = (value or "env:NONE").partition(":")
        if kind not in ("env", "block") or not target:
            raise ValueError("write env:VARIABLE or block:NAME, never the key itself")
        return value


class Tracking(_Part):
    """Where metrics go besides the bucket's own JSON lines: each step once, whatever the run has gone through."""

    wandb: Wandb | None = Field(default=None, description="Write them to Weights & Biases, too.")
    tensorboard: bool = Field(
        default=False, description="Write event files of TensorBoard into the run's folder, too."
    )

    @property
    def wanted(self) -> bool:
        """Whether metrics go anywhere else at all."""
        return self.wandb is not None or self.tensorboard


class Elastic(_Part):
    """How a run with `mode: elastic` cuts its steps, and whom it waits for. Units and their devices change numbers."""

    units: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Work units a step: the batch is cut into so many equal parts, whoever computes them. A multiple "
        "of every number of slices that may be there shares them out evenly.",
        examples=[24],
    )
    unit_devices: int = Field(
        default=1, ge=1, description="Devices that compute a unit together; a slice needs at least so many."
    )
    least_slices: int = Field(
        default=1, ge=1, description="Training begins with so many slices when `wait_minutes` are over."
    )
    wait_minutes: float = Field(
        default=10,
        ge=0,
        description="At the start, and when all slices were lost, the slices that are ready wait so long for the rest.",
    )
    stuck_seconds: float = Field(
        default=60,
        gt=0,
        description="A slice for which the others wait for longer is given up: it hangs. They go on without it.",
    )
    compare_every: int = Field(
        default=100,
        ge=0,
        description="Steps between two comparisons of all slices' parameters, which find a bad chip; 0: never.",
    )


# `-slice63` is added to it.
LONGEST_NAME_OVER_SLICES, MOST_SLICES = 32, 64

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_passable(text: str) -> None:
    """Refuse what no process can be given: found on a host it would look like a fault of the host."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("a NUL or half a character cannot be passed to a program")


class RunConfig(_Part):
    """One training run."""

    model_config = ConfigDict(json_schema_extra=form(_OF_RUN, of_the_pool=("slice", "max_cost", "code")))

    name: str = Field(
        pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="Name of the run: lower-case letters, digits and dashes, at most 40 characters.",
        examples=["icl-m64-seed0"],
    )
    steps: int = Field(default=1000, ge=1, lt=2**31, description="Total number of training steps.")
    training: Training | None = Field(default=None, description="A built-in training; or give `command`.")
    command: Annotated[
        list[str] | None, Field(description="Any program that trains; restarted until it exits 0.")
    ] = None
    contract: bool = Field(
        default=False,
        description="The command restores, logs and checkpoints through tpu.runtime.segment, so it has segments; "
        "without it a command is one segment and resumes by its own means.",
    )
    metrics_file: str | None = Field(
        default=None,
        description="File of JSON lines that a command without `contract` writes, relative to its folder. Their "
        "numbers are its metrics, as are those of JSON lines that it prints and what it logs to Weights & Biases.",
        examples=["out/metrics.jsonl"],
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="RELAY_SEED of a command; a built-in training has its own."
    )
    framework: Literal["jax", "xla"] = Field(
        default="jax",
        description="Framework of the built-in trainer, or of your command: JAX, or PyTorch/XLA, which has packages of "
        "its own on the hosts.",
    )
    checkpoints: CheckpointRule = Field(
        default=CheckpointRule(), description="At which steps a segment ends."
    )
    slice: Slice = Field(default=Slice(), description="The TPU slice to train on.")
    slices: int = Field(
        default=1,
        ge=1,
        le=MOST_SLICES,
        description="Number of such slices that train together; several need a `mode`. It changes no number.",
    )
    mode: Literal["spmd", "elastic"] | None = Field(
        default=None,
        description="How several slices train together. elastic: each runs a program of its own, and they sum the "
        "gradients; a slice that is lost costs no step. spmd: one program over all slices (not offered yet).",
    )
    elastic: Elastic | None = Field(
        default=None, description="Settings of `mode: elastic`; its defaults if empty."
    )
    max_cost: float | None = Field(
        default=None,
        gt=0,
        examples=[25],
        description="US dollars for slices: the run saves and ends when they are spent. Without it there is no limit.",
    )
    pool: str = Field(
        default="default",
        pattern=NAME_PATTERN,
        description="Pool of slices that the run takes its own from and gives it back to.",
    )
    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Runs of a higher priority may evict those of a lower one, at their next commit.",
    )
    code: str = Field(
        default="working-tree",
        description="The program: working-tree (from a terminal), a git URL or path with @commit, or a gs:// bundle.",
        examples=["working-tree", "https://github.com/me/project@3f2a91c", "gs://my-bucket/code.tar.gz"],
    )
    environment: Environment = Field(default=Environment(), description="Python and packages of the program.")
    variables: dict[str, str] = Field(
        default={}, description="Environment variables of the program (they are recorded)."
    )
    secrets: dict[str, str] = Field(
        default={},
        description="Secret variables of the program, each with where its value is: env:VARIABLE of the flow, or "
        'block:NAME of a Prefect Secret block, such as {"HF_TOKEN": "block:hf-token"}.',
    )
    evaluate: Literal["commits", "final", "never"] = Field(
        default="commits", description="Which checkpoints are evaluated."
    )
    evaluate_command: list[str] | None = Field(
        default=None,
        description="Your own evaluation: gets RELAY_RUN_DIR and RELAY_STEP, and prints one JSON object last.",
    )
    tracking: Tracking = Field(
        default=Tracking(), description="Where metrics go besides the bucket's own JSON lines."
    )
    budget: Budget = Field(default=Budget(), description="How often an attempt may end for each reason.")
    grace_seconds: float = Field(
        default=25, gt=0, le=600, description="From SIGTERM to SIGKILL; a spot notice gives 30 s."
    )
    progress_minutes: float = Field(
        default=20,
        gt=0,
        description="A gang without a new step, a command without a line of output, for so long is taken as hung.",
    )
    allow_mixed: bool = Field(
        default=False, description="Resume also on another chip or library version; marks the run mixed."
    )

    @field_validator("command", "evaluate_command", mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("command", "evaluate_command")
    @classmethod
    def _startable(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not (value and value[0]):
            raise ValueError("it is empty: write the program and its arguments, such as: python train.py")
        for word in value or ():
            _check_passable(word)
        return value

    @field_validator("variables", "secrets")
    @classmethod
    def _variable_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be a variable: write letters, digits and _, no digit first"
                )
            if name.startswith("RELAY_"):
                raise ValueError(f"{name}: what begins with RELAY_ is set by tpu-relay; choose another name")
            _check_passable(content)
        return value

    @field_validator("variables", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        number = (int, float)
        return {
            k: str(v) if isinstance(v, number) and not isinstance(v, bool) else v for k, v in value.items()
        }

    @field_validator("secrets")
    @classmethod
    def _secret_sources(cls, value: dict[str, str]) -> dict[str, str]:
        for name, source in value.items():
            kind, _, target = source.partition(":")
            if kind not in ("env", "block") or not target:
                raise ValueError(f"{name}: write env:VARIABLE or block:NAME, never the secret itself")
        return value

    @model_validator(mode="after")
    def _one_program(self) -> RunConfig:
        if (self.training is None) == (self.command is None):
            raise ValueError(
                "give exactly one of `training` (a built-in trainer) and `command` (any program)"
            )
        if self.training is not None and (self.contract or self.seed):
            raise ValueError(
                "`contract` and `seed` belong to a `command`; the seed of a training is training.seed"
            )
        if self.metrics_file is not None and self.commits:
            raise ValueError(
                "`metrics_file` belongs to a `command` without `contract`; others log to the run itself"
            )
        if len(self.slice.types) > 1 and not self.allow_mixed:
            raise ValueError(
                f"slice.candidates are of different types ({', '.join(self.slice.types)}), whose numbers differ: "
                "choose one type, or set allow_mixed"
            )
        if self.max_cost is not None and (free := [c for c in self.slice.choices if c.price_an_hour is None]):
            raise ValueError(
                f"max_cost cannot be held without the price of {free[0]}: set price_an_hour (US dollars an hour for "
                "the whole slice) of the slice, or of each of its candidates"
            )
        self._check_slices()
        stop_steps(self.checkpoints, self.steps)  # refuses impossible rules here, before anything is made
        return self

    def _check_slices(self) -> None:
        """Raises ValueError, one sentence, for what several slices cannot do."""
        if self.mode is None:
            if self.slices > 1:
                raise ValueError(
                    f"slices: {self.slices} slices need a mode: write `mode: elastic`, in which a slice that is lost "
                    "costs no step"
                )
            if self.elastic is not None:
                raise ValueError("elastic: these are settings of `mode: elastic`, and no mode is given")
            return
        kinds = [accelerator_type(name) for name in self.slice.types]
        if self.mode == "spmd":
            old = [kind.name for kind in kinds if kind.name.startswith(("v2-", "v3-"))]
            if self.slices > 1 and old:
                raise ValueError(
                    f"mode: {old[0]} does not support one program over several slices (MEGASCALE): choose v4 or "
                    "newer, or `mode: elastic`, which needs no such support"
                )
            raise ValueError("mode: spmd is not offered yet: write `mode: elastic`, or leave mode out")
        settings = self.elastic or Elastic()
        if settings.units < self.slices:
            raise ValueError(
                f"elastic.units: {settings.units} work units cannot be shared by {self.slices} slices: write at least "
                f"{self.slices}, better a multiple of it"
            )
        if settings.least_slices > self.slices:
            raise ValueError(
                f"elastic.least_slices: {settings.least_slices} are more than the run's {self.slices} slices"
            )
        if len(self.name) > LONGEST_NAME_OVER_SLICES:
            raise ValueError(
                f"name: at most {LONGEST_NAME_OVER_SLICES} characters with a mode, since each slice's part is called "
                f"NAME-slice0 and so on; found {len(self.name)}"
            )
        if self.framework != "jax":
            raise ValueError(f"mode: elastic is for JAX programs, found framework {self.framework}")
        if self.command is not None and not self.contract:
            raise ValueError(
                "mode: elastic needs a command that takes part by tpu.train.elastic or tpu.elastic.part: write "
                "`contract: true` if yours does"
            )
        if self.slice.chips is not None:
            raise ValueError("slice.chips: a run with a mode takes whole slices; leave chips out")
        for kind in kinds:
            if kind.hosts > 1:
                raise ValueError(
                    f"slice.accelerator_type: {kind.name} has {kind.hosts} hosts, and mode: elastic takes slices with "
                    "one host so far, such as v4-8 or v5litepod-8"
                )
            if kind.chips < settings.unit_devices:
                raise ValueError(
                    f"elastic.unit_devices: a {kind.name} has {kind.chips} chips, so {settings.unit_devices} devices "
                    "cannot compute a unit there"
                )
        if self.training is not None:
            if self.training.shard_parameters:
                raise ValueError(
                    "training.shard_parameters: with mode: elastic each unit has whole parameters; leave it out"
                )
            batch, parts = self.training.workload.batch, settings.units * settings.unit_devices
            if batch % parts:
                raise ValueError(
                    f"training.workload.batch: {batch} cannot be cut into {settings.units} work units for "
                    f"{settings.unit_devices} device(s) each: choose a multiple of {parts}"
                )

    @property
    def commits(self) -> bool:
        """Whether the program commits checkpoints of ours; a foreign command's end is its exit code 0."""
        return self.command is None or self.contract

    @property
    def notes(self) -> list[str]:
        """What is no mistake, but perhaps not meant."""
        note = self.training.schedule_note(self.steps) if self.training else None
        return [] if note is None else [note]

    def evaluates(self, step: int) -> bool:
        """Whether the checkpoint of `step` is to be evaluated."""
        if not self.commits or (self.command and not self.evaluate_command):
            return False
        return self.evaluate == "commits" or (self.evaluate == "final" and step == self.steps)

    def numbers(self, data_sha256: str | None) -> dict[str, Any]:
        """The part of the configuration that changes numbers.

        How far the run goes, where it is cut, on what terms its slice is had and what is watched do not.
        """
        part: dict[str, Any] = {} if self.slice.chips is None else {"chips": self.slice.chips}
        if self.mode == "elastic":
            settings = self.elastic or Elastic()
            part["elastic"] = {"units": settings.units, "unit_devices": settings.unit_devices}
        return part | {
            "framework": self.framework,
            "training": self.training.model_dump(mode="json") if self.training else None,
            "command": self.command,
            "seed": self.seed,
            "accelerator_type": ", ".join(sorted(self.slice.types)),
            "variables": dict(sorted(self.variables.items())),
            "data_sha256": data_sha256,
        }


def configuration_hash(numbers: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of the canonical JSON of what changes numbers."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(recorded: Any, wanted: Any, path: str = "") -> list[str]:
    """Lines `field: recorded → wanted` for every leaf in which two configurations differ."""
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        lines = []
        for key in sorted(recorded.keys() | wanted.keys()):
            lines += differences(recorded.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if recorded == wanted else [f"{path}: {json.dumps(recorded)} → {json.dumps(wanted)}"]


def parse_run_config(values: object) -> RunConfig:
    """Check a configuration.

    Raises:
        RunConfigError: one line for each wrong field.
    """
    if not isinstance(values, dict):
        raise RunConfigError("a run configuration is a mapping of fields such as `name:` and `training:`")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"] if part not in ("icl", "bytelm")) or "run"
            message = problem["msg"].removeprefix("Value error, ")
            found = "" if problem["type"] in ("missing", "value_error") else f" (found {problem['input']!r})"
            if problem["type"] == "extra_forbidden":
                message, found = _no_such_field(str(problem["loc"][-1])), ""
            if problem["type"] == "string_pattern_mismatch" and where in ("name", "pool"):
                message = "lower-case letters, digits and dashes, at most 40, a letter first and no dash last"
            lines.append(f"{where}: {message}{found}")
        raise RunConfigError("\n".join(lines)) from None


def _no_such_field(name: str) -> str:
    near = get_close_matches(name, _field_names(RunConfig), 1)
    return "there is no such field" + (f"; did you mean {near[0]}?" if near else "; --fields lists all")


def _field_names(annotation: Any) -> set[str]:
    """Names of all fields of a model and of those inside it."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {name for part in get_args(annotation) for name in _field_names(part)}
    inner = (_field_names(field.annotation) for field in annotation.model_fields.values())
    return set(annotation.model_fields).union(*inner)


def load_run_config(path: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file and set `changes`, dotted fields such as `training.seed`, over it.

    Raises:
        RunConfigError: the file cannot be read or a field is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RunConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RunConfigError(f"{path} is not a text file in UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an impossible date, a deep nest
        raise RunConfigError(f"{path} is not YAML: {error}") from None
    if isinstance(values, dict):
        apply_changes(values, changes or {})
    try:
        return parse_run_config(values)
    except RunConfigError as error:
        raise RunConfigError(
            f"{path}:\n" + "\n".join(f"  {line}" for line in str(error).splitlines())
        ) from None


def parse_changes(assignments: list[str]) -> dict[str, Any]:
    """Turn `training.seed=3` words into values, each read as YAML.

    Raises:
        RunConfigError: a word has no `=`.
    """
    changes = {}
    for assignment in assignments:
        field, equals, text = assignment.partition("=")
        if not equals or not field:
            raise RunConfigError(f"write FIELD=VALUE, such as training.seed=3; found {assignment!r}")
        try:
            changes[field] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise RunConfigError(f"{field}: the value is not YAML; found {text!r}") from None
    return changes


def apply_changes(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Set dotted fields such as `training.seed` in a nested mapping, in place."""
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        target = values
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            target = target[parent]
        target[leaf] = value
