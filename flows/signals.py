"""SIGTERM and Ctrl-C to a flow's process: leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from uuid import UUID

from prefect._flow_run_suspension import FlowRunSuspensionRequest, register_flow_run_suspension_request
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
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

    Where Ctrl-C is ignored it stays so: a shell without job control starts what it puts into the background that way,
    and nobody there would be cleaning up. SIGTERM ends such a process.
    """
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        yield
        return
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
    takes what its UI asked for as a crash: `asked_to_end` tells the two apart.
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
    """While whoever started this process is dead, ask Prefect from time to time whether the flow run is to end.

    The worker hears that for its flow runs, but one that is down hears nothing. It goes the way of SIGTERM.
    """
    parent = os.getppid()

    async def listen() -> None:
        while True:
            await asyncio.sleep(LISTEN_S)
            orphaned = parent == INIT or os.getppid() != parent
            if orphaned and await asked_to_end() is not None:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    listener = asyncio.create_task(listen())
    try:
        yield
    finally:
        listener.cancel()


@contextlib.contextmanager
def suspended_by_sigterm() -> Iterator[None]:
    """Let a flow run that is suspended end as a cancelled one does, and not at its next task.

    Prefect would raise an exception out of whatever task comes next, which is the one that deletes the slice.
    """
    if flow_run.id is None:
        yield
        return
    # What Prefect hears goes to the request that was registered last: this one, at which nobody looks.
    with register_flow_run_suspension_request(UUID(str(flow_run.id)), FlowRunSuspensionRequest()):
        yield


async def asked_to_end() -> State | None:
    """The state by which somebody asked this flow run to end: cancelled, or suspended; None if nobody did.

    None also if the server does not say.
    """
    if flow_run.id is None:
        return None
    try:
        async with get_client() as client:
            state = (await client.read_flow_run(UUID(str(flow_run.id)))).state
    except Exception:  # whatever it is, it must not hide how the flow ended
        return None
    if state is None or not (state.is_cancelling() or state.is_cancelled() or state.is_paused()):
        return None
    return state


def leave_suspended(asked: State | None) -> None:
    """Raises Pause if that is what was asked for: the flow run keeps this state until somebody resumes it."""
    if asked is not None and asked.is_paused():
        raise Pause(state=asked)
