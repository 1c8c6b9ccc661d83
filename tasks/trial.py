"""Train one trial of a sweep: one record in Prefect, however many segments and preemptions it has."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tpu.sweeps.carrier import Carrier


@task(name="trial", task_run_name="{name}", cache_policy=NO_CACHE)
async def train_trial(name: str, carrier: Carrier) -> None:
    """Return when the trial's run has reached its last step; preemptions are the run's own business."""
    await carrier.carry()
