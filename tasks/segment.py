"""Train from one planned checkpoint to the next."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.runtime import task_run

from tasks.provision import AS_OFTEN_AS_ALLOWED, provision
from tasks.sync import sync_code
from tpu.runs.driver import AttemptEnded, RunDriver
from tpu.runs.over_slices import OverSlices


def budget_allows(_task: Any, _task_run: Any, state: Any) -> bool:
    """The budget is counted from the run's events: Prefect's own counter starts again at 0 after a crash."""
    return isinstance(state.data, AttemptEnded) and state.data.retry


def segment_name(driver: RunDriver, number: int, start: int, stop: int) -> str:
    """As the UI shows it. Of a foreign command neither steps nor checkpoints are known."""
    name = f"segment {number}: steps {start}-{stop}" if driver.record.config.commits else "the command"
    return name if driver.attempt is None else f"{name}, attempt {driver.attempt}"


def _name_at_start() -> str:
    return segment_name(**task_run.parameters)


@task(
    name="train_segment",
    task_run_name=_name_at_start,
    retries=AS_OFTEN_AS_ALLOWED,
    retry_condition_fn=budget_allows,
    cache_policy=NO_CACHE,
)
async def train_segment(driver: RunDriver, number: int, start: int, stop: int) -> int:
    """Return once a checkpoint of `stop` is committed; start a gang first if none is training.

    Raises:
        AttemptEnded: the gang ended before; Prefect runs this task again if the budget allows.
    """
    if driver.attempt is None:
        if await driver.committed(stop):
            return stop
        await driver.back_off()
        async with driver.preparing():
            await provision(driver)
            await sync_code(driver)
            await driver.start_attempt()
    _name_this_task_run(segment_name(driver, number, start, stop))
    await driver.wait_for_commit(stop)
    return stop


@task(
    name="train_segment",
    task_run_name="segment {number}: steps {start}-{stop}",
    cache_policy=NO_CACHE,
)
async def wait_for_segment(slices: OverSlices, number: int, start: int, stop: int) -> int:
    """Return once a checkpoint of `stop` is committed, whoever trains. Raises as OverSlices.wait_for_commit."""
    await slices.wait_for_commit(stop)
    return stop


def _name_this_task_run(name: str) -> None:
    # Later state changes carry the task run, so the server takes the new name up with the next one.
    if (context := TaskRunContext.get()) is not None:
        context.task_run.name = name
