"""The preemption notice: SIGTERM from the supervisor, and the one step at which all processes stop for it.

A single process stops at its next border. Several must save the same step, or no checkpoint comes whole, and
no collective may run beside the training's own; so they agree through the bucket: each writes the border it
will reach next, and all go on to the furthest of them.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from tpu.checkpoint import files
from tpu.checkpoint.retry import RetryPolicy
from tpu.runtime.plan import Plan

# Of the 30 s between notice and the end of a spot VM, most must be left for the checkpoint itself.
AGREEMENT_S = 8.0


class StopRule(Protocol):
    """Whether to stop at a border.

    `install` may be called again, when something else took the signal. In `stops(step, following)`, `following` is
    the border after `step`.
    """

    def install(self) -> None: ...
    def stops(self, step: int, following: int) -> bool: ...
    def uninstall(self) -> None: ...


class AskProgram:
    """For programs that agree by their own means, such as JAX's preemption sync point."""

    def __init__(self, noticed: Callable[[int], bool]) -> None:
        self._noticed = noticed

    def install(self) -> None:
        """SIGTERM stays the program's own."""

    def stops(self, step: int, following: int) -> bool:
        return bool(self._noticed(step))

    def uninstall(self) -> None:
        """Nothing was installed."""


class OneProcess:
    """Stops at the first border after SIGTERM."""

    def __init__(self) -> None:
        self._noticed = False
        self._before = signal.getsignal(signal.SIGTERM)

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._take)

    def stops(self, step: int, following: int) -> bool:
        return self._noticed

    def uninstall(self) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True


class ManyProcesses:
    """Stops all processes of an attempt at the same border, by what each of them writes into the bucket.

    If others stay silent for `AGREEMENT_S`, each stops at its own next border: then the checkpoint may miss
    parts and is not committed, and the last commit stands.
    """

    def __init__(self, run_dir: str, attempt: int, process_id: int, num_processes: int) -> None:
        self._folder = f"{run_dir}/notices/{attempt}"
        self._process_id, self._num_processes = process_id, num_processes
        self._lock = threading.Lock()
        self._next_border = 0
        self._posted: int | None = None
        self._agreed: int | None = None
        self._decided = threading.Event()
        self._before = signal.getsignal(signal.SIGTERM)
        self._watching = False
        self._woken, self._waker = socket.socketpair()

    def install(self) -> None:
        # A wake-up descriptor, since Python's own handler waits until the training's thread leaves a
        # collective.
        self._waker.setblocking(False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="notice", daemon=True).start()

    def stops(self, step: int, following: int) -> bool:
        with self._lock:
            if self._posted is None:
                self._next_border = following
                return False
        self._decided.wait(2 * AGREEMENT_S)
        return step >= (self._agreed if self._agreed is not None else step)

    def uninstall(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._waker.close()

    def _watch(self) -> None:
        while True:
            numbers = self._woken.recv(16)
            if not numbers:
                return
            if signal.SIGTERM in numbers:
                break
        with self._lock:
            self._posted = self._next_border
        try:
            self._agreed = self._agree(self._posted)
        finally:
            self._decided.set()

    def _agree(self, border: int) -> int:
        quick = RetryPolicy(deadline_s=AGREEMENT_S / 2)
        files.write(f"{self._folder}/{self._process_id}.json", json.dumps({"border": border}).encode(), quick)
        deadline = time.monotonic() + AGREEMENT_S
        borders = {self._process_id: border}
        while len(borders) < self._num_processes and time.monotonic() < deadline:
            for url in files.names(self._folder):
                process = int(url.rpartition("/")[2].removesuffix(".json"))
                if process not in borders:
                    borders[process] = int(json.loads(files.read(url))["border"])
            if len(borders) < self._num_processes:
                time.sleep(0.1)
        return max(borders.values())


def stop_rule(plan: Plan, noticed: Callable[[int], bool] | None) -> StopRule:
    """The rule of one process: the program's own (`noticed`), or SIGTERM, agreed upon among several."""
    if noticed is not None:
        return AskProgram(noticed)
    if plan.num_processes == 1:
        return OneProcess()
    return ManyProcesses(plan.run_dir, plan.attempt, plan.process_id, plan.num_processes)
