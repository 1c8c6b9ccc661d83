"""End and delete everything of a run."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.runs.driver import RunDriver


@task(name="clean_up", task_run_name="clean up", retries=3, retry_delay_seconds=10, cache_policy=NO_CACHE)
async def clean_up(driver: RunDriver, why: str) -> None:
    """Return when the gang is confirmed dead and the cloud says that every slice is gone."""
    await driver.clean_up(why)
