"""Train a run to its end: segments between checkpoints, each a task that is tried again after a preemption."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed

from flows.arguments import train_from_terminal
from flows.names import flow_run_name, kept_name
from flows.plain_errors import EXPECTED, log_plainly
from flows.signals import (
    asked_to_end,
    cancelled_by_sigterm,
    cancelled_without_worker,
    leave_suspended,
    patient_with_ctrl_c,
    suspended_by_sigterm,
)
from tasks.cleanup import clean_up
from tasks.evaluate import evaluate
from tasks.events import Events
from tasks.fleet import fleet_told
from tasks.membership import Hearing, stint
from tasks.progress import Progress
from tasks.report import publish_report
from tasks.secrets import load_secrets, load_wandb_key
from tasks.segment import train_segment, wait_for_segment
from tpu.clock import SystemClock
from tpu.connection import Connection
from tpu.runs.announcing import Announcement, budget_reached, failed, finished, stopped
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runs.controller import ControllerLost, RunIsDriven, this_process
from tpu.runs.cost_limit import MaxCostReached
from tpu.runs.crew import Crew
from tpu.runs.driver import AttemptEnded, RunDriver
from tpu.runs.nothing_left import say_nothing_left
from tpu.runs.opening import open_lane, open_run, sharing
from tpu.runs.over_slices import Histories, OverSlices
from tpu.runs.record import RunRecord, bucket_of
from tpu.runs.starting import start_values
from tpu.runs.tenure import StopRequested
from tpu.unbroken import unbroken
from tpu.worker.patience import shorten_pauses


@flow(name="train", flow_run_name=flow_run_name)
async def train(
    *,  # as the form asks for them
    fresh_name: bool = False,
    changes: dict[str, Any] = {},  # noqa: B006 - `prefect deploy` reads the source, and a name is null in the form
    run: RunConfig,
    take_over: bool = False,
) -> dict[str, Any] | State[Any]:
    """Train one run on preemptible TPU slices.

    Args:
        fresh_name: Add this flow run's id to the run's name, so that every start is a run of its own. Without it a
            second start of the same name goes on with the first one's run. A name in `changes` is kept as it is.
        changes: Any field of `run` by its dotted name, also those that the form does not show, such as
            {"name": "mine", "training.log_every": 50, "budget.user_failure": 5}. `python -m flows.train --fields`
            lists them all.
        run: What to train, how far, on which slice.
        take_over: Take the run from a driver that is still alive.

    Returns:
        The report's figures: verdict, parameters' hash, goodput, cost, evaluation. A run that somebody stopped ends in
        the state Cancelled, one that has spent its max_cost in MaxCostReached (a kind of Cancelled).
    """
    log_plainly()
    shorten_pauses()
    log = get_run_logger()
    with (
        cancelled_by_sigterm(),
        suspended_by_sigterm(),
        patient_with_ctrl_c(log.warning),
        Events(log) as events,
    ):
        try:
            if changes or fresh_name:
                values = start_values(run.model_dump(mode="json"), changes, fresh_name, str(flow_run.id))
                run = parse_run_config(values)
            events.about(run.name)
            if kept_name() is not None:
                log.info("the run is called %s", run.name)
            for note in run.notes:
                log.warning(note)
            async with cancelled_without_worker():
                carry = train_to_the_end if run.mode is None else train_over_slices
                result = await carry(run, take_over, log, events)
            events.say(finished(result) if isinstance(result, dict) else stopped(result.message or ""))
            return result
        except Exception as error:  # each is told as an event; what is not expected goes on up
            if isinstance(error, ControllerLost) and error.flow_run == str(flow_run.id):
                # It was taken for dead and started again: its state is that of the other process now.
                log.warning("this flow run was started again elsewhere: %s", error)
                raise Abort(str(error)) from error
            for said in announced(error):
                events.say(said)
            if not isinstance(error, EXPECTED):
                raise
            # The state's message is what the UI shows first: the sentence, and not how Prefect came by it.
            return Failed(message=str(error), data=error)
        except asyncio.CancelledError:
            asked = await asked_to_end()
            events.say(stopped("suspended" if asked is not None and asked.is_paused() else "cancelled"))
            if asked is not None and asked.is_paused():
                log.info("%s is suspended: it goes on when it is resumed", run.name)
            leave_suspended(asked)
            if asked is None:
                raise
            return Cancelled(message=f"{run.name} was cancelled; started again it goes on")


def announced(error: Exception) -> list[Announcement]:
    """What is said of a run that ended by an error; one that another process drives goes on."""
    if isinstance(error, ControllerLost | RunIsDriven):
        return []
    reason = str(error) or type(error).__name__
    if isinstance(error, AttemptEnded) and error.exhausted:
        return [budget_reached(error.verdict.kind.value, reason), failed(reason)]
    return [failed(reason)]


async def train_over_slices(
    run: RunConfig, take_over: bool, log: logging.Logger | logging.LoggerAdapter[Any], events: Events
) -> dict[str, Any] | State[Any]:
    """As train_to_the_end, with a part for each slice, which comes and goes without the others."""
    connection, clock, progress = Connection.from_environment(), SystemClock(), Progress(run, log)
    owner, secrets, histories = this_process(str(flow_run.id)), await load_secrets(run.secrets), Histories()
    async with (
        sharing(connection, clock, log.info) as shared,
        open_lane(
            run, owner, report=log.info, connection=connection, folder=Path.cwd(), clock=clock, take_over=take_over,
            told=events.heard, spent=lambda: histories, wandb_key=await load_wandb_key(run),
        ) as lane,
        fleet_told(connection.bucket, histories, log),
    ):  # fmt: skip
        crew = Crew(connection, owner, secrets, shared, clock, Path.cwd(), log.info)
        slices = OverSlices(
            lane, crew, histories, lambda number, whole: Hearing(number, whole, progress, log), events.heard
        )
        failure: BaseException | None = None
        evaluations: list[asyncio.Task[dict[str, Any]]] = []
        try:
            async with slices.taking_part(stint):
                for number, start, stop in segments_of(lane.record):
                    await wait_for_segment(slices, number, start, stop)
                    if run.evaluates(stop):
                        evaluations.append(asyncio.create_task(evaluate(lane.record, lane.run_dir, stop)))
        except ControllerLost:
            raise  # another process drives the run now: nothing here may be cleaned up
        except BaseException as error:
            failure = error
        say_nothing_left()
        if isinstance(failure, asyncio.CancelledError):
            for evaluation in evaluations:
                evaluation.cancel()  # a person who wants to leave does not wait for them
        answers = await asyncio.gather(*evaluations, return_exceptions=True)
        return told_of(await publish_report(lane, failure), failure, answers)


def told_of(
    report: dict[str, Any], failure: BaseException | None, answers: Sequence[object]
) -> dict[str, Any] | State[Any]:
    """The report, or what it ended with: raised, unless somebody wanted it so."""
    if isinstance(failure, StopRequested):
        return Cancelled(message=f"{failure}; started again it goes on")
    if isinstance(failure, MaxCostReached):
        return Cancelled(name="MaxCostReached", message=str(failure))
    for problem in (failure, *answers):
        if isinstance(problem, BaseException):
            raise problem
    return report


def segments_of(record: RunRecord) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of each segment."""
    starts = (record.first_step, *record.segments)
    for number, (start, stop) in enumerate(zip(starts, record.segments, strict=False), 1):
        yield number, start, stop


async def train_to_the_end(
    run: RunConfig, take_over: bool, log: logging.Logger | logging.LoggerAdapter[Any], events: Events
) -> dict[str, Any] | State[Any]:
    """Train, and in whatever way that ends, clean up and report."""
    progress = Progress(run, log)
    async with (
        open_run(
            run,
            this_process(str(flow_run.id)),
            secrets=await load_secrets(run.secrets),
            wandb_key=await load_wandb_key(run),
            report=log.info,
            listener=progress,
            take_over=take_over,
            told=events.heard,
        ) as driver,
        fleet_told(bucket_of(driver.run_dir), driver.log.events, log),
    ):
        failure: BaseException | None = None
        evaluations: list[asyncio.Task[dict[str, Any]]] = []
        try:
            await driver.take_up()
            await train_all_segments(driver, evaluations)
        except ControllerLost:
            raise  # another process drives the run now: nothing here may be cleaned up
        except BaseException as error:
            failure = error
        await unbroken(clean_up(driver, why_it_ends(failure)))
        say_nothing_left()
        if isinstance(failure, asyncio.CancelledError):
            for evaluation in evaluations:
                evaluation.cancel()  # a person who wants to leave does not wait for them
        async with driver.waiting_for_evaluation():
            answers = await asyncio.gather(*evaluations, return_exceptions=True)
        return told_of(await publish_report(driver, failure), failure, answers)


def why_it_ends(failure: BaseException | None) -> str:
    """Why a slice is given back: in a few words, since the whole reason of a failure is said by itself."""
    if failure is None:
        return "training is done"
    if isinstance(failure, AttemptEnded):
        return f"the run ends by {failure.verdict.kind.value}"
    return str(failure) or type(failure).__name__


async def train_all_segments(driver: RunDriver, evaluations: list[asyncio.Task[dict[str, Any]]]) -> None:
    """Segment after segment; the evaluation of each commit goes on beside the next segment."""
    for number, start, stop in segments_of(driver.record):
        await train_segment(driver, number, start, stop)
        if driver.record.config.evaluates(stop):
            evaluations.append(asyncio.create_task(evaluate(driver.record, driver.run_dir, stop)))


if __name__ == "__main__":
    train_from_terminal(train)
