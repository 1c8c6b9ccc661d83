"""Prefect events of a run, for automations; their names and payloads stand in tpu/runs/announcing.py.

They are sent beside the training: nothing waits for them, what cannot be sent is left out, and so is a flood.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect.events import emit_event

from tpu.runs.announcing import Announcement, newest, payload_of, related_of, resource_of
from tpu.runs.event_log import RunEvent
from tpu.runs.record import run_directory

# A run has a few events an hour. One that is preempted again and again gets so many at once, and so many a minute.
AT_ONCE, A_MINUTE = 60.0, 6.0
# What is said last is given so long to be handed over; Prefect itself sends it before the process ends.
LAST_WORDS_S = 5.0


class Allowance:
    """So many at once, and so many a minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._room, self._at = AT_ONCE, now()

    def take(self) -> bool:
        now = self._now()
        self._room = min(AT_ONCE, self._room + (now - self._at) * A_MINUTE / 60)
        self._at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True


class Events:
    """Tells Prefect of one run, once it is known `about` which. Open it for a block, in the flow run's context."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._run = self._directory = ""
        self._log = log
        self._allowance = Allowance()
        self._waiting: queue.SimpleQueue[tuple[contextvars.Context, Announcement] | None] = (
            queue.SimpleQueue()
        )
        # Not of a pool of threads: these are waited for when the process ends, however long they hang.
        self._sender = threading.Thread(target=self._send, name="events", daemon=True)

    def __enter__(self) -> Events:
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._sender.join(LAST_WORDS_S)

    def about(self, run: str) -> None:
        self._run = run
        self._directory = run_directory(os.environ.get("TPU_RELAY_BUCKET", "").rstrip("/"), run)

    def heard(self, history: Sequence[RunEvent]) -> None:
        """Take the run's history whose last event is new."""
        try:
            said = newest(history)
        except Exception as error:  # a history that a later version wrote must not end a training
            self._log.debug("no event of %s: %r", history[-1].kind, error)
            return
        if said is not None and self._allowance.take():
            self.say(said)

    def say(self, said: Announcement) -> None:
        """Send it soon; Prefect adds the flow run in whose context this is called, its deployment and its pool."""
        if self._run:
            self._waiting.put((contextvars.copy_context(), said))

    def _send(self) -> None:
        while (item := self._waiting.get()) is not None:
            context, said = item
            try:
                context.run(
                    emit_event, said.name, resource_of(self._run, self._directory), related=related_of(said),
                    payload=payload_of(said, self._run, self._directory),
                )  # fmt: skip
            except Exception as error:  # whatever Prefect has to say against it, the training goes on
                self._log.debug("the event %s was not sent: %r", said.name, error)
