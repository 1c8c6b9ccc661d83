"""Bring code and environment to the hosts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.runs.driver import RunDriver


@task(name="sync_code", task_run_name="sync code", cache_policy=NO_CACHE)
async def sync_code(driver: RunDriver) -> str:
    """Return the content hash of the code that the hosts have now."""
    await driver.sync()
    return driver.record.code["sha256"]
