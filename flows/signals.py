"""SIGTERM to a flow's process: leave in order, as after Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Let the first SIGTERM cancel the task that runs the block; later ones are ignored while it cleans up.

    Prefect's own handler raises an exception out of whatever the event loop happens to run at that moment,
    which may be half of a deletion. A cancellation arrives where the flow waits. Prefect still hears through
    its own channel whether a cancellation was asked for in its UI, and marks the flow run accordingly.
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
