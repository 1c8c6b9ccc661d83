"""SIGTERM and Ctrl-C to a flow's process: leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

LISTEN_S, INIT = 10.0, 1

STILL_CLEANING_UP = (
    "still cleaning up: slices cost money until the cloud says that they are gone. Ctrl-C once more leaves them; "
    "the next start of the run, `relay stop` or the reaper deletes them then"
)


@contextlib.contextmanager
def patient_with_ctrl_c(report: Callable[[str], None]) -> Iterator[None]:
    """Let the second Ctrl-C only say what is still done; the first cancels as ever, and the third leaves at once.

    A second one is what everybody presses who sees no end, and asyncio would then drop a deletion half done.
    """
    before = signal.getsignal(signal.SIGINT)
    pressed = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed == 2:
            report(STILL_CLEANING_UP)
        elif callable(before):
            before(number, frame)

    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Let the first SIGTERM cancel the task that runs the block; later ones are ignored while it cleans up.

    Prefect's own handler raises an exception out of whatever the event loop happens to run at that moment,
    which may be half of a deletion. A cancellation arrives where the flow waits. But without its handler Prefect
    takes what its UI asked for as a crash: `cancelled_in_prefect` tells the two apart.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    told = False

    def cancel(_number: int, _frame: object) -> None:
        nonlocal told
        if not told:
            told = True
            loop.call_soon_threadsafe(task.cancel, "SIGTERM")

    try:
        before = signal.signal(signal.SIGTERM, cancel)
    except ValueError:  # not the main thread, which alone hears signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.asynccontextmanager
async def cancelled_without_worker() -> AsyncIterator[None]:
    """While whoever started this process is dead, ask Prefect from time to time whether the flow run is cancelled.

    The worker hears that for its flow runs, but one that is down hears nothing. A cancellation goes the way of SIGTERM.
    """
    parent = os.getppid()

    async def listen() -> None:
        while True:
            await asyncio.sleep(LISTEN_S)
            orphaned = parent == INIT or os.getppid() != parent
            if orphaned and await cancelled_in_prefect():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()


async def cancelled_in_prefect() -> bool:
    """Whether somebody asked for this flow run's cancellation; False also if the server does not say."""
    if flow_run.id is None:
        return False
    try:
        async with get_client() as client:
            state = (await client.read_flow_run(UUID(str(flow_run.id)))).state
    except Exception:  # whatever it is, it must not hide how the flow ended
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
