"""Steer a sweep from the Prefect UI: what `relay sweep` does from a terminal, as a form. Needs no TPU."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.states import Failed
from pydantic import BaseModel, ConfigDict, Field

from flows.plain_errors import EXPECTED, log_plainly
from tpu.checkpoint import objects
from tpu.connection import Connection
from tpu.sweeps.steering import (
    Steered,
    add_point,
    cancel_trials,
    find_sweep,
    raise_runs,
    set_priority,
    stop_sweep,
    who_hears,
)
from tpu.train.form import plain_optionals


class Wish(BaseModel):
    """What is to become of a sweep."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)

    cancel: list[str] = Field(
        default=[],
        description="Trials that are not to be trained any further, by number or by the name of their run.",
        examples=[["3"]],
    )
    add: list[dict[str, Any]] = Field(
        default=[],
        description="Points of your own; they come next, with each seed.",
        examples=[[{"training.optimizer.learning_rate": 0.1}]],
    )
    runs: int | None = Field(
        default=None, description="So many runs are drawn from the space in all, in place of fewer."
    )
    priority: int | None = Field(
        default=None, description="Of all of its trials; in a full pool higher ones evict lower ones."
    )
    stop: bool = Field(
        default=False,
        description="Stop the whole sweep, as when its flow run is cancelled; started again it goes on.",
    )


@flow(name="steer", flow_run_name="steer {sweep}")
async def steer(sweep: str, wish: Wish) -> list[str] | State[Any]:
    """Change what is to become of a sweep while it runs.

    Args:
        sweep: Its name, as its flow run and its table show it.
        wish: What is to become of it; what is left out stays as it is.

    Returns:
        What was done, in sentences.
    """
    log_plainly()
    log = get_run_logger()
    try:
        connection = Connection.from_environment()
        await asyncio.to_thread(objects.check_bucket, connection.bucket)
        found = await asyncio.to_thread(find_sweep, connection.bucket, sweep)
        told = await asyncio.to_thread(done, found, wish)
        for line in told:
            log.info(line)
        if wish.stop:
            await stop_sweep(connection, found, log.info)
        return told
    except EXPECTED as error:
        return Failed(message=str(error), data=error)  # the sentence, which the UI shows first


def done(sweep: Steered, wish: Wish) -> list[str]:
    """All but the stop, which waits."""
    told = [line for point in wish.add for line in add_point(sweep, point)]
    told += raise_runs(sweep, wish.runs) if wish.runs is not None else []
    told += set_priority(sweep, wish.priority) if wish.priority is not None else []
    told += cancel_trials(sweep, wish.cancel) if wish.cancel else []
    return [*told, who_hears(sweep)]
