"""What a flow that carries several runs gives to each of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.cloud import CloudError
from tpu.connection import Connection
from tpu.runs.controller import Owner
from tpu.runs.driver import RunDriver
from tpu.runs.opening import Shared

CLEAN_UP_TRIES, CLEAN_UP_AGAIN_S = 4, 10.0


@dataclass(frozen=True)
class Crew:
    """What the runs that one flow carries have in common, such as the trials of a sweep or the parts of a run."""

    connection: Connection
    owner: Owner
    secrets: dict[str, str]
    shared: Shared
    clock: Clock
    folder: Path
    report: Callable[[str], None]
    wandb_key: str | None = None
    # Evaluations of this machine, each a process with threads of its own: not one a trial that ends.
    evaluators: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 2))
    )


async def clean_up(driver: RunDriver, crew: Crew, why: str, keep: bool, save: bool) -> None:
    """RunDriver.clean_up, tried again if cloud or bucket do not answer."""
    for left in reversed(range(CLEAN_UP_TRIES)):
        try:
            return await driver.clean_up(why, keep, save)
        except (CloudError, StorageUnavailable) as error:
            if not left or (isinstance(error, CloudError) and not error.retryable):
                raise
            driver.report(f"cleaning up once more: {error}")
            await crew.clock.sleep(CLEAN_UP_AGAIN_S)
