"""The command line of a flow: a YAML file, changes over it, and a dry run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prefect import Flow
from prefect.exceptions import CancelledRun
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tpu.checkpoint.retry import StorageUnavailable
from tpu.connection import Connection, ConnectionSettingsError
from tpu.money import in_dollars
from tpu.runs.config import Elastic, RunConfig, RunConfigError, load_run_config, parse_changes
from tpu.runs.plan import stop_steps
from tpu.runs.record import (
    MalformedRecord,
    RunNameTaken,
    RunNotFound,
    RunRecord,
    check_startable,
    data_hash,
    load_record,
    run_directory,
)
from tpu.runs.tracker import check_tracking
from tpu.slices.pool_names import NoSuchPool, check_usable
from tpu.slices.preflight import Traffic, settings_problems
from tpu.slices.request import SliceRequest
from tpu.topology import AcceleratorType, accelerator_type
from tpu.train.text import TextNotFoundError
from tpu.worker.patience import patient_settings


def train_from_terminal(train: Flow[..., Any]) -> None:
    """Parse the arguments, check everything that can be checked, then run the flow. Exits 2 on a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.train",
        description="Train one run on preemptible TPU slices. Started again it goes on.",
        epilog="Addresses come from TPU_RELAY_PROJECT, TPU_RELAY_BUCKET and the like; `python -m tpu.emulator up` "
        "starts an emulated cloud, and `python -m tpu.emulator env` prints where it is.",
    )
    parser.add_argument(
        "config", type=Path, nargs="?", help="a run configuration, such as deployments/runs/icl.yaml"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run of the bucket, in place of a file")
    parser.add_argument("--name", help="name of the run, in place of the file's")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="changes",
                        help="change a field, such as training.seed=3; may be given more than once")  # fmt: skip
    parser.add_argument(
        "--take-over", action="store_true", help="take the run from a driver that is still alive"
    )
    parser.add_argument(
        "--fields", action="store_true", help="print every field of a configuration, and exit"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be made and what it costs; call nothing"
    )
    arguments = parser.parse_args()
    if arguments.fields:
        print("\n".join(field_lines(RunConfig)))
        return
    try:
        changes = parse_changes(arguments.changes)
        if arguments.name:
            changes["name"] = arguments.name
        if (arguments.config is None) == (arguments.resume is None):
            raise RunConfigError(
                "give a configuration file, such as deployments/runs/icl.yaml, or --resume RUN"
            )
        if arguments.resume and changes:
            raise RunConfigError(
                f"a run keeps its configuration, so --resume takes no {', '.join(changes)}; "
                f"for other settings: relay fork {arguments.resume}@STEP NEW-NAME --set FIELD=VALUE"
            )
        run = load_run_config(arguments.config, changes) if arguments.config else _recorded(arguments.resume)
        if not arguments.dry_run:
            _refuse_what_cannot_begin(run)  # here, before a flow run is made
    except (
        RunConfigError, RunNotFound, RunNameTaken, MalformedRecord, ConnectionSettingsError, TextNotFoundError,
        StorageUnavailable, NoSuchPool,
    ) as error:  # fmt: skip
        parser.exit(2, f"{parser.prog}: {error}\n")
    if arguments.dry_run:
        print(describe(run, _connection()))
        return
    with run_in_terminal(f"python -m flows.train --resume {run.name}"):
        asyncio.run(train(run=run, take_over=arguments.take_over))


@contextlib.contextmanager
def run_in_terminal(go_on: str | None = None) -> Iterator[None]:
    """Around a flow that a command runs: a Prefect server, and an exit code in place of a traceback.

    A flow that was stopped names the command `go_on`, if it has not done so itself.
    """
    try:
        with prefect_server_at_hand():
            yield
    except CancelledRun as stopped:
        sys.exit(str(stopped) if go_on is None or go_on in str(stopped) else f"{stopped}: {go_on}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:  # the flow has logged it with its traceback; a second one helps nobody
        sys.exit(f"{type(error).__name__}: {error}")


def prefect_server_at_hand() -> contextlib.AbstractContextManager[Any]:
    """Patience with the Prefect server, and settings for the one that Prefect starts if it is told of no other."""
    if PREFECT_API_URL.value():
        return temporary_settings(patient_settings())
    print(
        "PREFECT_API_URL is not set: this run gets a Prefect server of its own, which takes some 15 s to start and "
        "ends with it. To see runs in the UI, start a server (`make ui`) and set the variable as it says.",
        file=sys.stderr,
    )
    ephemeral: dict[Any, Any] = {
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 180,
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    return temporary_settings({**patient_settings(), **ephemeral})


def _refuse_what_cannot_begin(run: RunConfig) -> None:
    """Raises RunNameTaken if the name belongs to a run that would compute something else, NoSuchPool for a new run of a
    pool that nobody has made, RunConfigError if a package is missing."""
    bucket = Connection.from_environment().bucket
    check_tracking(run)
    directory = run_directory(bucket, run.name)
    try:
        existing = load_record(directory)
    except RunNotFound:
        check_usable(bucket, run.pool)
        return
    wanted = RunRecord(run, data_hash(run), existing.code, existing.created)
    check_startable(directory, existing, wanted)


def field_lines(model: type[BaseModel], indent: str = "") -> list[str]:
    """Every field of a configuration as commented YAML, with its choices and its default."""
    lines = []
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        notes = [] if inner else [_default(field)]
        if choices := _choices(field.annotation):
            notes.insert(0, " | ".join(choices))
        about = [field.description] if field.description else []
        about += [f"({'; '.join(notes)})"] if notes else []
        about += ["one of:"] if len(inner) > 1 else []
        lines.append(f"{indent}{name}:" + (f"  # {' '.join(about)}" if about else ""))
        for one in inner:
            lines += (
                [f"{indent}  # {(one.__doc__ or one.__name__).splitlines()[0]}"] if len(inner) > 1 else []
            )
            lines += field_lines(one, indent + "  ")
    return lines


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"default {json.dumps(field.default)}"


def _choices(annotation: Any) -> list[str]:
    """The words of a Literal."""
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return [str(word) for word in words] if len(words) > 1 else []


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _recorded(name: str) -> RunConfig:
    return load_record(run_directory(Connection.from_environment().bucket, name)).config


def describe(run: RunConfig, connection: Connection | None = None) -> str:
    """What a run would make, in a few lines; with a connection, also what of it would be refused."""
    stops = stop_steps(run.checkpoints, run.steps) if run.commits else (run.steps,)
    shown = ", ".join(map(str, stops[:8])) + (f", … {stops[-1]}" if len(stops) > 8 else "")
    built_in = f"the built-in {run.training.workload.kind} training in JAX" if run.training else ""
    program = " ".join(run.command or [built_in])
    cut = (
        f"segments   {len(stops)}, ending at steps {shown}"
        if run.commits
        else "segments   one: the command is started again until it exits 0, and resumes by its own checkpoints"
    )
    return "\n".join(
        [
            f"run        {run.name}: {program}" + (f", {run.steps} steps" if run.commits else ""),
            *_candidate_lines(run),
            *_slices_lines(run),
            *_limit_lines(run),
            cut,
            *(f"note       {note}" for note in run.notes),
            f"code       {run.code}",
            *(f"refused    {problem}" for problem in _refused(run, connection)),
            "nothing was made, and nobody was asked what the zones offer and where the bucket is (dry run)",
        ]
    )


def _slices_lines(run: RunConfig) -> list[str]:
    """How many slices train together, and how."""
    if run.mode is None:
        return []
    settings = run.elastic or Elastic()
    least = (
        "once all are ready"
        if settings.least_slices == run.slices
        else f"once all are ready, or after {settings.wait_minutes:g} minutes with {settings.least_slices}"
    )
    return [
        f"slices     {run.slices} of these, mode {run.mode}: {settings.units} work units a step, on "
        f"{settings.unit_devices} device(s) each; begins {least}"
    ]


def _limit_lines(run: RunConfig) -> list[str]:
    """What the run may cost, and how soon that can be reached."""
    if run.max_cost is None:
        return []
    dearest = max(run.slice.choices, key=lambda choice: choice.price_an_hour or 0.0)
    together = f"{run.slices} × " if run.slices > 1 else ""
    limit = f"max_cost   {in_dollars(run.max_cost)}: the run saves and ends when it is spent"
    if not dearest.price_an_hour:
        return [limit]
    return [
        f"{limit}, after {run.max_cost / dearest.price_an_hour / run.slices:.1f} h of a whole {together}{dearest} at "
        "the soonest"
    ]


def _candidate_lines(run: RunConfig) -> list[str]:
    """Each way to get the slice, with its price, and in which order they are gone."""
    lines, choices = [], run.slice.choices
    for number, choice in enumerate(choices, 1):
        kind = accelerator_type(choice.accelerator_type)
        image = run.slice.runtime_version or kind.runtime_version
        price = (
            f"${choice.price_an_hour:.2f} an hour"
            if choice.price_an_hour is not None
            else "price not known: set price_an_hour"
        )
        head = "slice      " if number == 1 else "           "
        which = f"{number}. " if len(choices) > 1 else ""
        lines.append(
            f"{head}{which}{choice}: {_share(run, kind)}, {kind.hosts} host(s), image {image}, {price}"
        )
    if len(choices) > 1:
        how = (
            f"{min(run.slice.race, len(choices))} are asked at once, and the first that is ready is kept"
            if run.slice.race > 1
            else "asked in this order"
        )
        lines.append(
            f"           {how}; each waits {run.slice.queue_minutes:g} minutes in its zone's queue before the next"
        )
    if run.pool != "default" or run.priority:
        lines.append(f"           of the pool {run.pool}, with priority {run.priority}")
    lines.append(f"           given up when none is ready after {run.slice.ready_minutes:g} minutes")
    return lines


def _share(run: RunConfig, kind: AcceleratorType) -> str:
    if run.slice.chips is None:
        return f"{kind.chips} chips"
    return f"{run.slice.chips} of its {kind.chips} chips"


def _refused(run: RunConfig, connection: Connection | None) -> list[str]:
    if connection is None:
        return []
    choices = run.slice.choices
    request = SliceRequest(choices[0].zone, choices[0].accelerator_type, external_ips=run.slice.external_ips)
    problems = settings_problems(
        choices, request, connection, None, run.slice.allow_regions, Traffic(None, 0)
    )
    return [text for _, text in problems]


def _connection() -> Connection | None:
    try:
        return Connection.from_environment()
    except ConnectionSettingsError:
        return None
