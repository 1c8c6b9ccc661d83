"""Get a ready slice."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.cloud.errors import CloudError
from tpu.runs.driver import RunDriver

# `retry_condition_fn` decides; Prefect wants a number all the same.
AS_OFTEN_AS_ALLOWED = 10**6


def worth_another_try(_task: Any, _task_run: Any, state: Any) -> bool:
    """A passing fault of the cloud; never a wrong zone, type or right, nor a user's patience that is over."""
    return isinstance(state.data, CloudError) and state.data.retryable


@task(
    name="provision",
    task_run_name="provision a slice",
    retries=AS_OFTEN_AS_ALLOWED,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
)
async def provision(driver: RunDriver) -> str:
    """Return the name of a ready slice of one of the run's candidates."""
    return (await driver.provision()).name
