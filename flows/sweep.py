"""Sweep: many trials of one run over a space, each on its own chips, as many at once as the pool has places."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed

from flows.arguments import field_lines, run_in_terminal
from flows.names import flow_run_name
from flows.plain_errors import EXPECTED, log_plainly
from flows.signals import (
    asked_to_end,
    cancelled_by_sigterm,
    leave_suspended,
    patient_with_ctrl_c,
    suspended_by_sigterm,
)
from tasks.secrets import load_secrets, load_wandb_key
from tasks.sweep_board import SweepPage
from tasks.trial import PRUNED, train_trial
from tpu.checkpoint import objects
from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import SystemClock
from tpu.cloud import CloudError
from tpu.connection import Connection, ConnectionSettingsError
from tpu.runs.code import Bundle, resolve_code
from tpu.runs.config import RunConfig, RunConfigError, parse_changes, parse_run_config
from tpu.runs.controller import this_process
from tpu.runs.crew import Crew
from tpu.runs.evaluation import evaluate_checkpoint
from tpu.runs.opening import become_controller, sharing
from tpu.runs.record import RunNotFound, load_record, renew_code, run_directory
from tpu.runs.starting import start_values
from tpu.runs.tenure import StopRequested, Tenure
from tpu.runs.tracker import check_tracking
from tpu.runs.trimming import delete_idle
from tpu.slices.deletion import DeletionUnconfirmed
from tpu.slices.lease_book import GcsLeaseBook, LeaseContended
from tpu.sweeps.board import Live
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.carrier import Carrier, Carries
from tpu.sweeps.config import Search, SweepError, check_sweep, load_sweep, places_of
from tpu.sweeps.fleet import SliceLives
from tpu.sweeps.outcome import Outcome, read_outcome
from tpu.sweeps.outcome import State as Ended
from tpu.sweeps.pack_carrier import PackCarrier
from tpu.sweeps.pruner import for_trials
from tpu.sweeps.pruning import Judge
from tpu.sweeps.queue import Queue, Running
from tpu.sweeps.report import headline
from tpu.sweeps.search import Searcher, storage_url
from tpu.sweeps.trial import NAME_LENGTH, Trial
from tpu.sweeps.wishes import WishBox

Log = logging.Logger | logging.LoggerAdapter[Any]


@flow(name="sweep", flow_run_name=flow_run_name)
async def sweep(
    *,  # as the form asks for them
    fresh_name: bool = False,
    changes: dict[str, Any] = {},  # noqa: B006 - `prefect deploy` reads the source, and a name is null in the form
    search: Search,
    run: RunConfig,
    rerun_failed: bool = False,
    code: str = "",
) -> dict[str, Any] | State[Any]:
    """Train every trial of a sweep on preemptible TPU slices.

    Args:
        fresh_name: Add this flow run's id to the sweep's name, so that every start is a sweep of its own. Without it a
            second start of the same name goes on with the first one's.
        changes: Any field of `run` by its dotted name, also those that the form does not show, such as
            {"steps": 2000, "slice.race": 2}. `python -m flows.train --fields` lists them all.
        search: The space, how it is gone through, and what is compared.
        run: What each trial trains; its name is the sweep's. A sweep that a schedule starts carries the time for which
            it was scheduled in its name, so that each is a new one.
        rerun_failed: Start trials that failed or were stopped again, too.
        code: Newer code for these and for trials that begin from now on, as `code` of a run has it; `newest` is that of
            `run` as it is now. If empty, all have the code of the sweep's first start.

    Returns:
        How many trials finished, were pruned, failed and were stopped, and the best one.
    """
    log_plainly()
    log = get_run_logger()
    with cancelled_by_sigterm(), suspended_by_sigterm(), patient_with_ctrl_c(log.warning):
        try:
            if changes or fresh_name:
                values = start_values(run.model_dump(mode="json"), changes, fresh_name, str(flow_run.id))
                run = parse_run_config(values)
            run = named_by_schedule(run)
            check_sweep(run, search)
            return await sweep_to_the_end(run, search, rerun_failed, log, code)
        except StopRequested as stopped:
            return Cancelled(message=f"{stopped}; started again it goes on")
        except EXPECTED as error:
            return Failed(message=str(error), data=error)
        except asyncio.CancelledError:
            leave_suspended(asked := await asked_to_end())
            if asked is None:
                raise
            return Cancelled(message=f"the sweep {run.name} was cancelled; started again it goes on")


def named_by_schedule(run: RunConfig) -> RunConfig:
    """With the time in its name for which a schedule has planned this flow run, if one has."""
    context = FlowRunContext.get()
    planned = context.flow_run if context is not None else None
    if planned is None or not planned.auto_scheduled or planned.expected_start_time is None:
        return run
    return run.model_copy(
        update={"name": scheduled_name(run.name, f"{planned.expected_start_time:%y%m%d-%H%M%S}")}
    )


def scheduled_name(name: str, time: str) -> str:
    return f"{name[: NAME_LENGTH - len(time) - 1].rstrip('-')}-{time}"


async def sweep_to_the_end(
    run: RunConfig, search: Search, rerun_failed: bool, log: Log, newer: str
) -> dict[str, Any]:
    """Train all trials, delete the slices that nobody needs any more, and report."""
    # Of the usual handful each trial would wait for the bucket's answers to all others.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(objects.CONNECTIONS))
    connection, clock = Connection.from_environment(), SystemClock()
    check_tracking(run)
    secrets, wandb_key = await load_secrets(run.secrets), await load_wandb_key(run)
    await asyncio.to_thread(objects.check_bucket, connection.bucket)
    sweep_dir = sweep_directory(connection.bucket, run.name)
    owner = this_process(str(flow_run.id))
    controller = await become_controller(sweep_dir, owner, False, clock, log.info)
    tenure = Tenure(controller, sweep_dir, clock, log.info)
    book, pools = SweepBook(sweep_dir), GcsLeaseBook(connection.bucket, log.info)
    tenure.start()
    try:
        source = run.code if newer in ("", "newest") else newer
        code = await asyncio.to_thread(resolve_code, source, Path.cwd(), connection.home / "git")
        # One version for all trials, also of those that a later start adds, unless that is asked for a newer one.
        code_url = await asyncio.to_thread(book.open, run, search, code, bool(newer))
        base = run.model_copy(update={"code": code_url})
        storage = storage_url(search, connection.home, connection.bucket, run.name)
        study = f"{connection.bucket.removeprefix('gs://')}/{run.name}"
        searcher = await asyncio.to_thread(Searcher, search, study, storage)
        pruner = for_trials(search.pruner, run, search.runs) if search.pruner is not None else None
        judge = Judge(pruner, run.name, search.metric)
        queue = Queue(run.name, search, book, searcher, judge, WishBox(sweep_dir), log.info)
        page = SweepPage(run.name, queue.board, book, SliceLives(pools, run.pool), clock, log)
        log.info(
            "sweep %s: at most %s runs, by %s, in pool %s", run.name, search.runs, search.method, run.pool
        )
        await queue.take_up(rerun_failed)
        async with sharing(connection, clock, log.info) as shared:
            crew = Crew(connection, owner, secrets, shared, clock, Path.cwd(), log.info, wandb_key)

            def train(
                batch: Sequence[Running], pack: Sequence[Trial], hands_on: Callable[[], bool]
            ) -> Sequence[Coroutine[Any, Any, Outcome]]:
                priority = run.priority if queue.priority is None else queue.priority
                config = base.model_copy(update={"priority": priority})
                renewed = code if newer and any(one.trial.number in queue.again for one in batch) else None
                carriers: Sequence[Carries] = (
                    PackCarrier(config, search.metric.name, batch, pack, hands_on, crew, renewed).trials
                    if pack
                    else [Carrier(config, search.metric.name, one, hands_on, crew) for one in batch]
                )
                return [
                    train_one(one, carrier, search, crew, renewed)
                    for one, carrier in zip(batch, carriers, strict=True)
                ]

            async def places() -> int:
                await tenure.still_wanted()
                return await places_now(run, search, pools)

            try:
                await queue.carry(train, places, page.show)
            finally:
                with suppress(CloudError, DeletionUnconfirmed, StorageUnavailable, LeaseContended):
                    await delete_idle(run.pool, shared.cloud, pools, clock, log.info)
                await page.close()
        log.info("%s; results: %s/results.parquet and .csv", headline(queue.board), sweep_dir)
        return figures(queue, run.name)
    finally:
        await tenure.leave()


async def places_now(run: RunConfig, search: Search, pools: GcsLeaseBook) -> int:
    """How many trials, or packs of them, may train now: as many as the slices of the pool have places for, one slice
    without a limit."""
    slices = (await pools.settings(run.pool)).max_slices
    at_once = None if search.at_once is None else max(1, search.at_once // (search.pack or 1))
    if at_once is not None and slices is None:
        return at_once
    places = max(1, slices or 1) * places_of(run)
    return places if at_once is None else min(places, at_once)


async def train_one(
    running: Running, carrier: Carries, search: Search, crew: Crew, newer: Bundle | None
) -> Outcome:
    """Train one trial, with newer code if there is, and say what became of it: its failure is its own."""
    ended: Ended = "failed"
    trial = running.trial
    run_dir = run_directory(crew.connection.bucket, trial.run)
    try:
        if newer is not None:
            with suppress(RunNotFound):  # it failed before there was one
                await asyncio.to_thread(renew_code, run_dir, newer)
        # Prefect's annotation of return_state forgets that it is awaited.
        training: Any = train_trial(f"trial {trial.number}: {trial.run}", carrier, return_state=True)
        state: State[Any] = await training
        reason = state.message or ""
        if state.is_completed():
            ended, reason = ("pruned", reason) if state.name == PRUNED else ("finished", "")
        elif state.is_cancelled():
            ended = "stopped"
        else:
            await state.aresult()
        if ended == "finished":
            ended = "failed"  # until what is to be evaluated is
            await evaluate_trained(run_dir, running.live, crew)
            ended = "finished"
    except Exception as error:  # whatever it is, the other trials go on
        reason = str(error) or type(error).__name__
    return await asyncio.to_thread(read_outcome, run_dir, search.metric, ended, reason, crew.clock.time())


async def evaluate_trained(run_dir: str, live: Live, crew: Crew) -> None:
    """Evaluate on this machine what a trial's run wants evaluated, after its chips have gone to the next one."""
    record = await asyncio.to_thread(load_record, run_dir)
    steps = [step for step in record.segments if record.config.evaluates(step)]
    if not steps:
        return
    live.evaluating = True
    live.free()
    name = record.config.name
    for step in steps:
        async with crew.evaluators:
            await evaluate_checkpoint(record, run_dir, step, lambda text: crew.report(f"{name}: {text}"))


def figures(queue: Queue, name: str) -> dict[str, Any]:
    """What a program wants of a sweep."""
    best = queue.board.best()
    return {
        "sweep": name,
        "finished": queue.board.count("finished"),
        "pruned": queue.board.count("pruned"),
        "failed": queue.board.count("failed"),
        "stopped": queue.board.count("stopped"),
        "best": None
        if best is None
        else {
            "run": best[0].run,
            "parameters": dict(best[0].parameters),
            "seed": best[0].seed,
            queue.board.metric: best[1],
        },
    }


def describe(run: RunConfig, search: Search, notes: tuple[str, ...]) -> str:
    """What a sweep would train, in a few lines."""
    lines = [f"sweep      {run.name}: at most {search.runs} runs, by {search.method}"]
    lines.append(f"compares   {search.metric.name}, {search.metric.goal}")
    for name, parameter in search.parameters.items():
        shown = parameter.model_dump(exclude_unset=True)
        lines.append(f"parameter  {name}: {', '.join(f'{k} {v}' for k, v in shown.items())}")
    if search.pruner is not None:
        shown = for_trials(search.pruner, run, search.runs).model_dump(exclude_none=True)
        lines.append(f"pruner     {', '.join(f'{k} {v}' for k, v in shown.items())}")
    if search.seeds:
        lines.append(f"seeds      {', '.join(map(str, search.seeds))}")
    kind = run.slice.choices[0]
    room = places_of(run) * (search.pack or 1)
    packed = "" if search.pack is None else f" ({search.pack} in one program on a chip)"
    lines.append(f"slices     {kind}, with room for {room} trial(s) each{packed}, of the pool {run.pool}")
    lines += [f"note       {note}" for note in notes]
    return "\n".join([*lines, "nothing was made (dry run)"])


def sweep_from_terminal() -> None:
    """Parse the arguments, check everything that can be checked, then run the flow. Exits 2 on a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.sweep",
        description="Train every trial of a sweep on preemptible TPU slices. Started again it goes on.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", help="a sweep file, such as deployments/sweeps/icl.yaml"
    )
    parser.add_argument("--name", help="name of the sweep, in place of the file's")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="changes",
                        help="change a field, such as run.steps=3000; may be given more than once")  # fmt: skip
    parser.add_argument(
        "--rerun-failed", action="store_true", help="start trials that failed or were stopped again, too"
    )
    parser.add_argument("--code", metavar="SOURCE", default="", help="newer code for these and for new "
                        "trials: a git URL or path with @commit, or `newest` for the file's as it is now")  # fmt: skip
    parser.add_argument("--fields", action="store_true", help="print every field of a sweep file, and exit")
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained; call nothing")
    arguments = parser.parse_args()
    if arguments.fields:
        print("run:  # as for flows.train, see `python -m flows.train --fields`; its name is the sweep's")
        print("\n".join(field_lines(Search)))
        return
    try:
        if arguments.file is None:
            raise SweepError("give a sweep file, such as deployments/sweeps/icl.yaml")
        changes = parse_changes(arguments.changes)
        if arguments.name:
            changes["run.name"] = arguments.name
        read = load_sweep(arguments.file, changes)
        if not arguments.dry_run:
            check_tracking(read.run)
            Connection.from_environment()  # here, before a flow run is made
    except (SweepError, RunConfigError, ConnectionSettingsError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if arguments.dry_run:
        print(describe(read.run, read.search, read.notes))
        return
    for note in read.notes:
        print(f"note: {note}", file=sys.stderr)
    with run_in_terminal():
        answer = asyncio.run(
            sweep(run=read.run, search=read.search, rerun_failed=arguments.rerun_failed, code=arguments.code)
        )
    if isinstance(answer, dict) and answer["failed"]:
        sys.exit(f"{answer['failed']} trial(s) failed; start them again with --rerun-failed")


if __name__ == "__main__":
    sweep_from_terminal()
