"""Evaluate a checkpoint on the flow's own machine, beside the training."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.runs.driver import RunDriver
from tpu.runs.evaluation import evaluate_checkpoint


@task(
    name="evaluate",
    task_run_name="evaluate step {step}",
    retries=2,
    retry_delay_seconds=5,
    cache_policy=NO_CACHE,
)
async def evaluate(driver: RunDriver, step: int) -> dict[str, float]:
    """Return the metrics of the checkpoint of `step`; one that was evaluated before is not evaluated again."""
    return await evaluate_checkpoint(driver.record, driver.run_dir, step, driver.report)
