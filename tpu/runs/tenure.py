"""The right of this process to act for a run: it beats, hears that the run is to stop, and notices a rival.

Whatever waits for long waits through it, so that a stop or a lost run ends the wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakSet

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.runs.controller import Controller, pace_s
from tpu.runs.stop_request import stop_requested
from tpu.slices.provision import NoLongerWanted


class StopRequested(NoLongerWanted):
    """Somebody asked the run to stop (`relay stop`)."""


class Tenure:
    """Held from `start` to `leave`; `interruption` gets the error that ends it early."""

    _held: ClassVar[WeakSet[Tenure]] = WeakSet()  # by this process

    def __init__(
        self, controller: Controller, run_dir: str, clock: Clock, report: Callable[[str], None]
    ) -> None:
        self.interruption: asyncio.Future[None] | None = None
        self._controller = controller
        self._run_dir = run_dir
        self._clock = clock
        self.report = report
        self._task: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raises ControllerLost if another process drives the run now."""
        await asyncio.to_thread(self._controller.check)

    def start(self) -> None:
        """From now on show that this process lives, and hear whether it is to stop or has lost the run."""
        self.interruption = asyncio.get_running_loop().create_future()
        self._held.add(self)

        async def beat() -> None:
            while True:
                next_s = pace_s(len(self._held))
                try:
                    await asyncio.to_thread(self._controller.beat, next_s)
                    asked = await asyncio.to_thread(stop_requested, self._run_dir, self._controller.term)
                except StorageUnavailable as error:
                    self.report(f"the bucket does not answer; trying again ({error})")
                except Exception as error:  # lost, or not to be understood: silence would be taken for death
                    self.interrupt(error)
                    return
                else:
                    if asked:
                        self.interrupt(StopRequested("stopped by request"))
                await self._clock.sleep(next_s)

        self._task = asyncio.create_task(beat())

    def interrupt(self, error: Exception) -> None:
        """End the tenure early: whoever waits, now or next, gets this error. Only the first one counts."""
        if self.interruption is not None and not self.interruption.done():
            self.interruption.set_exception(error)
            self.interruption.exception()  # seen by whoever waits next; nobody need wait

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than the run is wanted and ours."""
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            awaited = {sleep} | ({self.interruption} if self.interruption else set())
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
        await self.still_wanted()

    async def still_wanted(self) -> None:
        """Raises what ends the tenure early, if something has."""
        if self.interruption is not None and self.interruption.done():
            self.interruption.result()

    async def leave(self) -> None:
        """Beat no more, and give the right back."""
        self._held.discard(self)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # what it had to say was said
                await self._task
        await asyncio.to_thread(self._controller.release)
