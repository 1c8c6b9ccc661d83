"""Carry a run from checkpoint to checkpoint without a record of its own for each: what a trial of a sweep does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tpu.cloud import CloudError
from tpu.runs.driver import AttemptEnded, RunDriver

# Between two tries to get a slice from a cloud that does not answer.
CLOUD_AGAIN_S = 5.0


async def carry(driver: RunDriver) -> None:
    """Train to the last step, in as many attempts as the budgets allow.

    Raises:
        AttemptEnded: a budget is used up.
        tpu.cloud.errors.CloudError: no slice can be had.
    """
    for stop in driver.record.segments:
        while not await _reached(driver, stop):
            pass


async def _reached(driver: RunDriver, stop: int) -> bool:
    """Whether `stop` was reached; False if the attempt has ended before and another one may follow."""
    if driver.attempt is None and await driver.committed(stop):
        return True
    return await attempt(driver, lambda: driver.wait_for_commit(stop))


async def attempt(driver: RunDriver, wait: Callable[[], Awaitable[None]]) -> bool:
    """Start a gang unless one trains, and `wait`; False if it has come to nothing and another attempt may follow.

    Raises:
        As `carry`.
    """
    try:
        if driver.attempt is None:
            await driver.back_off()
            async with driver.preparing():
                await driver.provision()
                await driver.sync()
                await driver.start_attempt()
        await wait()
    except AttemptEnded as error:
        if not error.retry:
            raise
        return False
    except CloudError as error:
        if not error.retryable:
            raise
        driver.report(f"trying again for a slice: {error}")
        await driver.pause(CLOUD_AGAIN_S)
        return False
    return True
