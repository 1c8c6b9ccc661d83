"""What a member keeps of a run in the bucket while it is the one that saves: checkpoints, and the losses of all steps.

Whoever saves has an attempt of the run of its own, opened when its turn begins: so what an earlier one still writes,
hung or cut off, is refused by the fence. Losses are known to every member, and handed on to those that arrive, so that
the next one that saves has those since the last commit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tpu.checkpoint.fence import FenceContended, FencedOut, open_attempt, update_fence
from tpu.checkpoint.retry import StorageUnavailable
from tpu.checkpoint.save import DivergedError, SaveFailed, Saver, SaveTarget
from tpu.elastic.member import BESIDE
from tpu.runtime.metrics import MetricsWriter
from tpu.runtime.plan import Plan

# Between two tries to save what could not be.
AGAIN_S = 2.0
# What is left to a save that has begun when the member ends for another reason.
LAST_SAVES_S = 15.0
_STEPS, _LOSSES = f"{BESIDE}steps", f"{BESIDE}losses"


class Tell(Protocol):
    def __call__(self, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True)
class _Wanted:
    step: int
    state: Any
    committed: Callable[[], None]


class Saving:
    """`arrays` gives a state's arrays by name; `tell` notes an event. Losses are logged every `log_every` steps.

    `confirmed` says, before an attempt is opened, whether who told this member to save is the run's coordinator still.
    """

    def __init__(
        self,
        plan: Plan,
        arrays: Callable[[Any], Mapping[str, np.ndarray]],
        environment: Mapping[str, str],
        mixed: bool,
        tell: Tell,
        log_every: int = 1,
        confirmed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.failure: DivergedError | None = None
        self._plan, self._arrays, self._tell, self._log_every = plan, arrays, tell, log_every
        self._confirmed = confirmed
        self._committed = 0
        self._environment, self._mixed = dict(environment), mixed
        self._lock = threading.Lock()
        self._losses: dict[int, tuple[float, float]] = {}  # of steps that are not committed: (when, loss)
        self._metrics: MetricsWriter | None = None
        self._saver: Saver | None = None
        self._queue: queue.Queue[_Wanted | bool | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="saving", daemon=True)
        self._thread.start()

    # Hooks of the member.
    def log(self, step: int, loss: float) -> None:
        """The loss of step `step` (counted from 1), before its update."""
        row = (round(time.time(), 4), loss)
        with self._lock:
            self._losses[step] = row
            if self._metrics is not None:
                self._log(self._metrics, step, row)

    def lead(self, leads: bool) -> None:
        """From now on the run's checkpoints are this member's to save, or not any more."""
        self._queue.put(leads)

    def save(self, step: int, state: Any, committed: Callable[[], None]) -> None:
        self._queue.put(_Wanted(step, state, committed))

    def forget(self, step: int) -> None:
        """Everything up to `step` is committed, and so are its losses."""
        with self._lock:
            self._committed = max(self._committed, step)
            self._losses = {at: row for at, row in self._losses.items() if at > step}

    def hand_on(self) -> dict[str, np.ndarray]:
        with self._lock:
            steps = sorted(self._losses)
            losses = [self._losses[step][1] for step in steps]
        return {_STEPS: np.array(steps, np.int64), _LOSSES: np.array(losses, np.float64)}

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        now = round(time.time(), 4)
        told = zip(arrays[_STEPS].tolist(), arrays[_LOSSES].tolist(), strict=True)
        with self._lock:
            self._losses = {step: (now, loss) for step, loss in told} | self._losses

    def close(self) -> None:
        """Finish what was begun."""
        self._queue.put(None)
        self._thread.join(LAST_SAVES_S)

    # In the thread.
    def _work(self) -> None:
        leads, failed = False, False
        pending: dict[int, _Wanted] = {}
        while True:
            begins = self._saver is None and self._committed < self._plan.last_step
            due = leads and (pending or begins) and self.failure is None
            try:
                item = self._queue.get(timeout=(AGAIN_S if failed else 0) if due else None)
            except queue.Empty:
                failed = not self._save_all(pending)
                continue
            if item is None:
                break
            if isinstance(item, _Wanted):
                pending[item.step] = item
                continue
            leads = item
            if not leads:
                self._end_attempt()
        self._end_attempt()

    def _save_all(self, pending: dict[int, _Wanted]) -> bool:
        """Save and commit what is pending; whether that went well."""
        try:
            if self._saver is None and not self._confirmed():
                return False
            saver = self._saver or self._begin_attempt()
            for step in sorted(pending):
                saver.save(step, dict(self._arrays(pending[step].state)))
            if pending:
                saver.wait()
        except FencedOut as error:
            # Another one was told to save, perhaps while we hung: then we hear so before this is tried again.
            self._tell("save_refused", reason=str(error))
            self._end_attempt()
            return False
        except DivergedError as error:
            self.failure = error
            return False
        except (SaveFailed, StorageUnavailable, FenceContended, OSError) as error:
            self._tell("save_failed", what="checkpoint", reason=f"{type(error).__name__}: {error}")
            return False
        for step in sorted(pending):
            pending.pop(step).committed()
        return True

    def _begin_attempt(self) -> Saver:
        plan = self._plan
        fence = update_fence(plan.run_dir, lambda one: open_attempt(one, one.attempt + 1))
        newest = fence.newest()
        metrics = MetricsWriter(plan.run_dir, fence.attempt)
        target = SaveTarget(
            plan.run_dir, fence.attempt, environment=self._environment, mixed=self._mixed, keep=plan.keep
        )
        self._saver = Saver(target, self._tell, before_commit=metrics.flush)
        with self._lock:
            self._metrics = metrics
            for step, row in sorted(self._losses.items()):
                if step > (newest.step if newest else 0):
                    self._log(metrics, step, row)
        self._tell("leads", attempt=fence.attempt)
        return self._saver

    def _end_attempt(self) -> None:
        if self._saver is None:
            return
        self._saver.close(LAST_SAVES_S)
        with self._lock:
            metrics, self._metrics = self._metrics, None
        self._saver = None
        assert metrics is not None
        metrics.close()

    def _log(self, metrics: MetricsWriter, step: int, row: tuple[float, float]) -> None:
        if step % self._log_every == 0 or step == self._plan.last_step:
            metrics.add({"t": row[0], "step": step, "loss": row[1]})
