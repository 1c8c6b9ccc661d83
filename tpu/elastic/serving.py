"""A coordinator in a thread of a member's process, for as long as it is the run's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from tpu.checkpoint.retry import StorageUnavailable
from tpu.elastic.coordinator import Coordinator
from tpu.elastic.place import Place, look
from tpu.elastic.rules import Options

# How often it looks whether another one has taken its place.
WATCH_S = 2.0
# The last word to members is on its way within that.
END_S = 5.0


class Serving:
    """Listens on `host` at a fresh port from the moment it is made until `end`.

    Raises OSError if it cannot listen there.
    """

    def __init__(
        self, run_dir: str, host: str, key: str, options: Options, event: Callable[..., None]
    ) -> None:
        self.port = 0
        self._run_dir, self._host = run_dir, host
        self._coordinator = Coordinator(options, key, event)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def alone(self) -> bool:
        """Whether no member is connected any more."""
        return self._coordinator.connected == 0

    def watch(self, place: Place) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._until_replaced(place)))

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(END_S)

    def _run(self) -> None:
        self._task = self._loop.create_task(self._coordinator.serve(self._host, 0, self._listening))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except OSError as error:
            self._failure = error
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.01))  # they hang up
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._ready.set()

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()

    async def _until_replaced(self, place: Place) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                found = await asyncio.to_thread(look, self._run_dir)
            except StorageUnavailable:
                continue  # whoever takes the place needs the bucket, too
            if found is None or found[0].term != place.term:
                self._task.cancel()
                return
