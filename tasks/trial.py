"""Train one trial of a sweep: one record in Prefect, however many segments and preemptions it has."""

from __future__ import annotations

from typing import Any

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed

from tpu.runs.cost_limit import MaxCostReached
from tpu.runs.tenure import StopRequested
from tpu.sweeps.carrier import Carries
from tpu.sweeps.course import TrialPruned

PRUNED, STOPPED = "Pruned", "Stopped"


@task(name="trial", task_run_name="{name}", cache_policy=NO_CACHE)
async def train_trial(name: str, carrier: Carries) -> State[Any] | None:
    """Return when the trial's run has reached its last step; preemptions are the run's own business.

    One that was stopped early has done what was wanted of it, so its state is Completed, by the name Pruned.
    """
    try:
        await carrier.carry()
    except TrialPruned as pruned:
        return Completed(name=PRUNED, message=str(pruned))
    except (StopRequested, MaxCostReached) as stopped:
        return Cancelled(name=STOPPED, message=str(stopped))
    return None
