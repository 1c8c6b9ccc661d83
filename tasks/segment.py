"""Train from one planned checkpoint to the next."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from tasks.provision import provision
from tasks.sync import sync_code
from tpu.runs.driver import AttemptEnded, RunDriver


def budget_allows(_task: Any, _task_run: Any, state: Any) -> bool:
    """The budget is counted from the run's events: Prefect's own counter starts again at 0 after a crash."""
    return isinstance(state.data, AttemptEnded) and state.data.retry


@task(
    name="train_segment",
    task_run_name="segment {number}: steps {start}-{stop}",
    retries=10**6,
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
    _name_this_task_run(f"segment {number}: steps {start}-{stop}, attempt {driver.attempt}")
    await driver.wait_for_commit(stop)
    return stop


def _name_this_task_run(name: str) -> None:
    # Later state changes carry the task run, so the server takes the new name up with the next one.
    if (context := TaskRunContext.get()) is not None:
        context.task_run.name = name
