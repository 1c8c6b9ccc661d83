"""End and delete everything of a run."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.cloud import CloudError
from tpu.runs.controller import ControllerLost
from tpu.runs.driver import RunDriver


def worth_another_try(_task: Any, _task_run: Any, state: Any) -> bool:
    """Not for who has lost the run, nor for a damaged record or a missing right: these do not pass by themselves."""
    if isinstance(state.data, CloudError):
        return state.data.retryable
    return not isinstance(state.data, ControllerLost | ValueError)


@task(
    name="clean_up",
    task_run_name="clean up",
    retries=3,
    retry_delay_seconds=10,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
)
async def clean_up(driver: RunDriver, why: str) -> None:
    """Return when the gang is confirmed dead and the cloud says that every slice is gone."""
    await driver.clean_up(why)
