"""`relay`: look at runs, stop, extend, fork, profile and export them.

Exit codes: 0 fine, 1 found a problem, 2 wrong usage. Each command imports what it needs, so that `relay --help`
answers at once.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.configured import configured_connection
from flows.pool_command import pool_app
from flows.preflight_command import preflight
from flows.sweep_command import sweep_app

if TYPE_CHECKING:
    from tpu.connection import Connection

app = typer.Typer(
    name="relay", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Runs of training on preemptible TPU slices. The bucket and project come from TPU_RELAY_* variables.",
)  # fmt: skip

app.add_typer(pool_app, name="pool")
app.add_typer(sweep_app, name="sweep")
app.command()(preflight)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="name of a run")]
RunAtStep = Annotated[
    str, typer.Argument(metavar="RUN@STEP", help="a run and the step of one of its checkpoints")
]
HostIndex = Annotated[int, typer.Option("--host", min=0, help="number of the host")]


class WrongUsage(Exception):
    """An argument cannot be understood; the message shows how to write it."""


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    try:
        app()
    except WrongUsage as error:
        _refuse(error, 2)
    except Exception as error:  # sorted at once: what is no user's business is raised again
        from flows.command_errors import exit_code

        code = exit_code(error)
        if code is None:
            raise
        _refuse(error, code)


def _refuse(error: Exception, code: int) -> None:
    print(f"relay: {error}", file=sys.stderr)
    sys.exit(code)


def _run(name: str) -> tuple[Connection, str]:
    """The connection, and the directory of a run that exists."""
    from tpu.runs.record import load_record, run_directory

    connection = configured_connection()
    directory = run_directory(connection.bucket, _checked(name))
    load_record(directory)
    return connection, directory


def _checked(name: str) -> str:
    if not name or set(name) & set("/@?#*"):
        raise WrongUsage(f"a run's name has lower-case letters, digits and dashes; found {name!r}")
    return name


def _at_step(text: str) -> tuple[str, int]:
    run, at, step = text.rpartition("@")
    if not at or not run or not step.isascii() or not step.isdigit():
        raise WrongUsage(f"write RUN@STEP, such as icl@500; found {text!r}")
    return run, int(step)


def _dollars(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        raise WrongUsage(f"write dollars, such as 12.50, or none; found {text!r}") from None


def _say(text: str) -> None:
    print(text, flush=True)


@app.command()
def runs() -> None:
    """List the runs in the bucket."""
    from tpu.money import in_dollars
    from tpu.runs.overview import list_runs

    bucket = configured_connection().bucket
    lines = list_runs(bucket)
    for line in lines:
        steps = "a command" if line.steps is None else f"{line.step} of {line.steps}"
        origin = f"; forked from {line.parent}" if line.parent else ""
        origin += f"; a slice of {line.part_of}" if line.part_of else ""
        cost = "–" if line.dollars is None else in_dollars(line.dollars)
        print(f"{line.name:32} {steps:>17} {cost:>9}  {_time(line.created)}  {line.state}{origin}")
    if not lines:
        print(f"no runs in {bucket} yet: python -m flows.train deployments/runs/icl.yaml")


@app.command()
def show(run: RunName) -> None:
    """Show a run: its configuration, attempts and checkpoints, and the report if there is one."""
    from tpu.checkpoint import files
    from tpu.runs.showing import describe_run

    _, directory = _run(run)
    print("\n".join(describe_run(directory)))
    try:
        report = files.read(f"{directory}/report/report.md").decode()
    except FileNotFoundError:
        return
    print()
    if sys.stdout.isatty():
        from tpu.runs.terminal_report import print_rendered

        print_rendered(report, f"{directory}/report", sys.stdout)
    else:
        print(report)


@app.command()
def status(run: RunName) -> None:
    """Say how a run is now; while it has no slice yet, why: one line a candidate."""
    from tpu.runs.showing import status_of

    print("\n".join(status_of(_run(run)[1])))


@app.command()
def zones(
    forget: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="know nothing of a zone any more, such as of missing quota"),
    ] = None,
) -> None:
    """Say how zones have served lately: which are asked slower or not at all, and why."""
    from tpu.clock import SystemClock
    from tpu.runs.showing import zone_lines
    from tpu.slices.project_memory import memory_of_bucket

    memory = memory_of_bucket(configured_connection().bucket, SystemClock())
    if forget is not None:
        asyncio.run(memory.forget(forget))
    lines = zone_lines(asyncio.run(memory.health()), SystemClock().time())
    print("\n".join(lines) or "nothing bad is known of any zone")


@app.command()
def logs(
    run: RunName,
    host: HostIndex = 0,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="number of the attempt; the newest if left out")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on as more comes, until nobody drives the run")
    ] = False,
) -> None:
    """Print what a run's program printed on one host."""
    from tpu.runs.logs import follow_log, read_log

    _, directory = _run(run)
    for part in (follow_log if follow else read_log)(directory, run, attempt, host):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


@app.command()
def ssh(
    run: RunName,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="run this there, as ssh would")
    ] = None,
    host: HostIndex = 0,
) -> None:
    """Log in to a host of the run's slice with OpenSSH, or run a command there."""
    from tpu.runs.remote import login_command

    connection, directory = _run(run)
    command = asyncio.run(login_command(connection, directory, host, words or ()))
    try:
        os.execvp(command[0], command)  # ssh takes our place: terminal, signals and exit code are its own
    except FileNotFoundError:
        raise WrongUsage("there is no `ssh` on this machine: install an OpenSSH client") from None


@app.command()
def stop(run: RunName) -> None:
    """Save a checkpoint, end the run and delete its slice. Started again it goes on from there."""
    from tpu.runs.stopping import stop_run

    connection, directory = _run(run)
    asyncio.run(stop_run(connection, directory, _say))


@app.command()
def extend(
    run: RunName,
    steps: Annotated[int | None, typer.Option(min=1, help="new total number of steps")] = None,
    max_cost: Annotated[
        str | None, typer.Option(metavar="DOLLARS", help="new limit of what it may cost in all, or none")
    ] = None,
) -> None:
    """Let a run go on to more steps, or spend more; its numbers stay the same."""
    from tpu.runs.cost_limit import check_above_spent
    from tpu.runs.event_log import load_events
    from tpu.runs.record import extend as extend_run
    from tpu.runs.record import set_max_cost

    if steps is None and max_cost is None:
        raise WrongUsage("say what to extend: --steps N, --max-cost DOLLARS, or both")
    limit = _dollars(max_cost) if max_cost is not None else None
    _, directory = _run(run)
    told = []
    if max_cost is not None:
        check_above_spent(run, load_events(directory), limit, time.time())
        set_max_cost(directory, limit)
        told.append("has no max_cost now" if limit is None else f"may cost ${limit:,.2f} in all")
    if steps is not None:
        before = extend_run(directory, steps).extensions[-1][0]
        told.append(f"has {steps} steps now, {before} before")
    print(f"{run} {' and '.join(told)}; go on: python -m flows.train --resume {run}")


@app.command()
def fork(
    source: RunAtStep,
    name: Annotated[str, typer.Argument(metavar="NEW", help="name of the new run")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="change a field")
    ] = None,
) -> None:
    """Make a new run from a checkpoint of another one, with other settings."""
    from tpu.runs.config import parse_changes
    from tpu.runs.fork import fork as fork_run
    from tpu.runs.record import run_directory

    run, step = _at_step(source)
    wanted = parse_changes(changes or [])
    connection, directory = _run(run)
    fork_run(directory, step, run_directory(connection.bucket, _checked(name)), name, wanted)
    print(f"{name} begins at step {step} of {run}; start it: python -m flows.train --resume {name}")


@app.command()
def export(source: RunAtStep, to: Annotated[Path, typer.Option(help="folder")] = Path()) -> None:
    """Write a checkpoint as one plain safetensors file, and its configuration as JSON."""
    from tpu.checkpoint.export import export as export_checkpoint

    run, step = _at_step(source)
    for path in export_checkpoint(_run(run)[1], step, to):
        print(path)


@app.command()
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="a run, or the step of one of its checkpoints")
    ],
    every: Annotated[bool, typer.Option("--all", help="all checkpoints of the run, not the newest")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="also what was evaluated before; the new figures are kept")
    ] = False,
) -> None:
    """Evaluate checkpoints on this machine with the run's own evaluator; exits 1 if one cannot be."""
    from tpu.runs.evaluation import EvaluationFailed, asked_checkpoints, evaluate_checkpoint
    from tpu.runs.evaluation_table import to_markdown
    from tpu.runs.terminal_report import print_rendered

    asked = asked_checkpoints(configured_connection().bucket, checkpoint, every)
    evaluations, failures = {}, {}
    for step in asked.steps:
        try:
            figures = evaluate_checkpoint(asked.record, asked.run_dir, step, _say, again)
            evaluations[step] = asyncio.run(figures)
        except EvaluationFailed as error:
            failures[step] = str(error)
    text = to_markdown(asked.record.config.name, evaluations, failures)
    if sys.stdout.isatty():
        print_rendered(text, "", sys.stdout)
    else:
        print(text)
    if failures:
        print(f"relay: {len(failures)} of {len(asked.steps)} could not be evaluated", file=sys.stderr)
        sys.exit(1)


@app.command()
def verify(run: RunName) -> None:
    """Check every byte of all checkpoints; exits 1 if one is damaged."""
    from tpu.checkpoint.fence import load_fence
    from tpu.checkpoint.verify import verify_commit

    _, directory = _run(run)
    commits = load_fence(directory).commits
    damaged = 0
    for commit in commits:
        verdict = verify_commit(directory, commit)
        damaged += not verdict.whole
        found = (
            f"whole, {verdict.files} files, {verdict.bytes} bytes"
            if verdict.whole
            else f"DAMAGED: {verdict.damage}"
        )
        _say(f"step {commit.step:>9} attempt {commit.attempt:>4}  {found}")
    if not commits:
        print(f"{run} has no checkpoints yet")
    if damaged:
        print(f"relay: {damaged} of {len(commits)} checkpoints of {run} are damaged", file=sys.stderr)
        sys.exit(1)


@app.command()
def profile(
    run: RunName, steps: Annotated[int, typer.Option(min=1, help="how many steps to trace")] = 20
) -> None:
    """Trace the next steps on host 0 into the bucket, to be opened in XProf or Perfetto."""
    from tpu.runs.remote import profile_run

    connection, directory = _run(run)
    where = asyncio.run(profile_run(connection, directory, steps, _say))
    print(
        f"{where}\nXProf: give it this folder as --logdir; Perfetto (https://ui.perfetto.dev): open its .trace.json.gz"
    )


@app.command()
def reap(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be deleted; change nothing")
    ] = False,
    pool: Annotated[str | None, typer.Option(help="look at this pool's slices only")] = None,
    zone: Annotated[
        list[str] | None, typer.Option(help="a zone to ask, should the cloud not answer for all at once")
    ] = None,
) -> None:
    """Delete the slices that nobody needs any more. Takes about a minute, to see who is silent."""
    from tpu.clock import SystemClock
    from tpu.cloud.google import open_cloud
    from tpu.runs.reap_report import to_markdown
    from tpu.runs.reaping import Reaped, Reaper, Scope
    from tpu.runs.terminal_report import print_rendered
    from tpu.slices.lease_book import GcsLeaseBook
    from tpu.slices.pool_names import check_there

    connection = configured_connection()
    if pool is not None:
        check_there(connection.bucket, pool)

    async def once() -> Reaped:
        async with open_cloud(connection) as cloud:
            scope, book = Scope(connection.bucket, pool, tuple(zone or ())), GcsLeaseBook(connection.bucket)
            return await Reaper(scope, cloud, book, SystemClock(), _say).run(dry_run=dry_run)

    done = asyncio.run(once())
    text = to_markdown(done)
    if sys.stdout.isatty():
        print_rendered(text, "", sys.stdout)
    else:
        print(text)
    if done.troubles:
        print("relay: not everything could be seen or done, see Troubles above", file=sys.stderr)
        sys.exit(1)


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


if __name__ == "__main__":
    main()
