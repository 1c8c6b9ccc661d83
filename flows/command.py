"""`relay`: look at runs, stop, extend, fork and export them."""

from __future__ import annotations

import asyncio
import datetime
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from tpu.runs.remote import HostNotReady, login_command, request_profile

from tpu.checkpoint import files
from tpu.checkpoint.digest import NoSuchCheckpoint
from tpu.checkpoint.export import export as export_checkpoint
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.restore import Damaged
from tpu.checkpoint.verify import verify_run
from tpu.connection import Connection, ConnectionSettingsError
from tpu.runs.config import RunConfigError, parse_changes
from tpu.runs.event_log import load_events
from tpu.runs.fork import fork as fork_run
from tpu.runs.record import RunNameTaken, RunNotFound, load_record, run_directory
from tpu.runs.record import extend as extend_run
from tpu.runs.stopping import stop_run

app = typer.Typer(
    name="relay", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Runs of training on preemptible TPU slices. The bucket and project come from TPU_RELAY_* variables.",
)  # fmt: skip

RunName = Annotated[str, typer.Argument(metavar="RUN", help="name of a run")]
RunAtStep = Annotated[
    str, typer.Argument(metavar="RUN@STEP", help="a run and the step of one of its checkpoints")
]
HostIndex = Annotated[int, typer.Option("--host", min=0, help="number of the host")]
EXPECTED = (
    ConnectionSettingsError, RunConfigError, RunNotFound, RunNameTaken, NoSuchCheckpoint, Damaged, HostNotReady, ValueError,
)  # fmt: skip


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    try:
        app()
    except EXPECTED as error:
        sys.exit(f"relay: {error}")


def _directory(run: str) -> str:
    return run_directory(Connection.from_environment().bucket, run)


def _at_step(text: str) -> tuple[str, int]:
    run, at, step = text.partition("@")
    if not at or not step.isdigit():
        raise ValueError(f"write RUN@STEP, such as icl@500; found {text!r}")
    return run, int(step)


@app.command()
def runs() -> None:
    """List the runs in the bucket."""
    bucket = Connection.from_environment().bucket
    names = sorted(
        {
            path.split("/runs/")[1].split("/")[0]
            for path in files.filesystem().glob(f"{bucket}/runs/*/run.json")
        }
    )
    for name in names:
        record, newest = load_record(_directory(name)), load_fence(_directory(name)).newest()
        made = datetime.datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M")
        print(f"{name:40} {newest.step if newest else 0:>9} of {record.config.steps:<9} {made}")
    if not names:
        print(f"no runs in {bucket} yet: python -m flows.train deployments/runs/icl.yaml")


@app.command()
def show(run: RunName) -> None:
    """Show a run: its configuration, attempts and checkpoints, and the report if there is one."""
    directory = _directory(run)
    record, fence = load_record(directory), load_fence(directory)
    print(f"{run}: configuration {record.hash[:16]}…, code {record.code['source']}")
    for event in load_events(directory):
        if event.kind in ("attempt-started", "attempt-ended", "slice-ready", "slice-deleted"):
            at = datetime.datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
            detail = event.detail
            told = f"{detail['verdict']}: {detail['reason']}" if "verdict" in detail else detail.get("slice")
            print(f"{at} {event.kind:16} {detail.get('attempt') or '':>4} {told}")
    print("checkpoints:", ", ".join(f"{c.step} (attempt {c.attempt})" for c in fence.commits) or "none")
    if files.filesystem().exists(f"{directory}/report/report.md"):
        print("\n" + files.read(f"{directory}/report/report.md").decode())


@app.command()
def logs(
    run: RunName,
    host: HostIndex = 0,
    attempt: Annotated[int | None, typer.Option(help="number of the attempt; the newest if left out")] = None,
) -> None:
    """Print what a run's program printed on one host."""
    directory = _directory(run)
    load_record(directory)
    number = attempt or load_fence(directory).attempt
    parts = sorted(
        path for path in files.names(f"{directory}/logs/{number}") if f"/{host}-" in path.replace("-w", "/")
    )
    for part in parts:
        sys.stdout.write(files.read(part).decode(errors="replace"))
    if not parts:
        raise ValueError(f"host {host} of attempt {number} of {run} has no log in the bucket yet")


@app.command()
def ssh(run: RunName, host: HostIndex = 0) -> None:
    """Log in to a host of the run's slice."""
    command = asyncio.run(login_command(Connection.from_environment(), _directory(run), host))
    sys.exit(subprocess.call(command))


@app.command()
def stop(run: RunName) -> None:
    """Save a checkpoint, end the run and delete its slice. Started again it goes on from there."""
    asyncio.run(stop_run(Connection.from_environment(), _directory(run), print))


@app.command()
def extend(run: RunName, steps: Annotated[int, typer.Option(help="new total number of steps")]) -> None:
    """Let a run go on to more steps; its numbers stay the same."""
    record = extend_run(_directory(run), steps)
    print(f"{run} has {record.config.steps} steps now; start it again: python -m flows.train --resume {run}")


@app.command()
def fork(
    source: RunAtStep,
    name: Annotated[str, typer.Argument(help="name of the new run")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="change a field")
    ] = None,
) -> None:
    """Make a new run from a checkpoint of another one, with other settings."""
    run, step = _at_step(source)
    fork_run(_directory(run), step, _directory(name), name, parse_changes(changes or []))
    print(f"{name} begins at step {step} of {run}; start it: python -m flows.train --resume {name}")


@app.command()
def export(source: RunAtStep, to: Annotated[Path, typer.Option(help="folder")] = Path()) -> None:
    """Write a checkpoint as one plain safetensors file, and its configuration as JSON."""
    run, step = _at_step(source)
    for path in export_checkpoint(_directory(run), step, to):
        print(path)


@app.command()
def verify(run: RunName) -> None:
    """Check every byte of all checkpoints; exits 1 if one is damaged."""
    load_record(_directory(run))
    verdicts = verify_run(_directory(run))
    for verdict in verdicts:
        print(f"step {verdict.step:>9} attempt {verdict.attempt:>4}  "
              + (f"whole, {verdict.files} files, {verdict.bytes} bytes" if verdict.whole else f"DAMAGED: {verdict.damage}"))  # fmt: skip
    if not verdicts:
        print("no checkpoints yet")
    sys.exit(any(not verdict.whole for verdict in verdicts))


@app.command()
def profile(
    run: RunName, steps: Annotated[int, typer.Option(min=1, help="how many steps to trace")] = 20
) -> None:
    """Trace the next steps into the bucket, to be opened in XProf or Perfetto."""
    where = asyncio.run(request_profile(Connection.from_environment(), _directory(run), steps))
    print(f"the next {steps} steps are traced into {where}; relay logs {run} tells when it is there")


if __name__ == "__main__":
    main()
