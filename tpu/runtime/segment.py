"""The segment contract for Python programs: about six lines around an ordinary training loop.

    from tpu.runtime import segment

    with segment.start() as seg:
        state = seg.restore(state)
        for step, count in seg.calls(10):
            state, loss = train(state, step, count)
            seg.log(step + count, loss=loss)
            seg.checkpoint(step + count, state)

Step s means: s updates are done. The program ends by itself with the codes that the flow understands: 0
finished; 75 start me again as I am, after a preemption notice (the checkpoint is committed) or when the
bucket or another host failed; 76 another attempt has taken over. Everything else, such as an exception, is
the program's own failure.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tpu.checkpoint.fence import FencedOut
from tpu.checkpoint.manifest import environment_difference
from tpu.checkpoint.save import DivergedError, SaveFailed, Saver, SaveTarget, is_infrastructure
from tpu.checkpoint.shards import placed
from tpu.checkpoint.tree import StateMismatch, leaves_of, make_room, placed_leaves
from tpu.runtime.events import EventLog
from tpu.runtime.fingerprint import MixedEnvironment, fingerprint
from tpu.runtime.metrics import MetricsWriter
from tpu.runtime.notice import stop_rule
from tpu.runtime.opening import Opening
from tpu.runtime.plan import ContractError, Plan, call_length

EXIT_NOTICED = 75  # EX_TEMPFAIL, also when the bucket or another host failed: start me again as I am
EXIT_FENCED_OUT = 76

# What a failing program still gives the saves that it has begun: the failure is to be known soon.
LAST_SAVES_S = 15.0

Phase = Literal["start", "restore", "compile", "step", "save", "evaluate", "idle", "other"]
Facts = Mapping[str, str]

__all__ = [
    "EXIT_FENCED_OUT",
    "EXIT_NOTICED",
    "DivergedError",
    "FencedOut",
    "Phase",
    "Plan",
    "Segment",
    "start",
]


def start(
    noticed: Callable[[int], bool] | None = None,
    environment: Facts | Callable[[], Facts] | None = None,
    plan: Plan | None = None,
) -> Segment:
    """Begin the part of a run that this process trains; use it as a context manager.

    Call it before heavy imports: it begins to fetch the newest checkpoint at once, beside them.

    Args:
        noticed: for programs of several processes that agree by their own means: asked at each border with
            its step, and must answer the same on all processes. Without it SIGTERM is watched and agreed upon
            here.
        environment: further facts that change the bits, recorded and compared at resume; a function is called
            by `restore`.
        plan: what to do; read from the RELAY_* environment variables when left out.

    Raises:
        ContractError: the environment variables are incomplete or malformed.
    """
    return Segment(plan or Plan.from_environment(), noticed, environment or {})


class _During:
    """A phase that lasts for a `with` block."""

    def __init__(self, segment: Segment, before: Phase | None) -> None:
        self._segment = segment
        self._before: Phase | None = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._segment.phase(self._before)


class Segment:
    """One process of one attempt, from its start to its end. Made by `start`."""

    def __init__(
        self, plan: Plan, noticed: Callable[[int], bool] | None, environment: Facts | Callable[[], Facts]
    ) -> None:
        self.plan = plan
        self.step = 0
        self.committed = 0  # the newest step that counts; 0 if there is none, or none is known yet
        self._extra = environment
        self._environment: Facts = {}
        self._mixed = False
        self._leads = plan.process_id == 0
        self._events = EventLog(plan.events_path, plan.member)
        self._metrics = MetricsWriter(plan.run_dir, plan.attempt) if self._leads else None
        self._saver: Saver | None = None
        self._kept_step: int | None = None  # the newest step of which nothing would be lost now
        self._phase: Phase | None = None
        self._stop_rule = stop_rule(plan, noticed)
        self._steps_per_call = 1
        self._stop_steps = frozenset(plan.stop_steps)
        self._event("start", attempt=plan.attempt, process=plan.process_id)
        self.phase("start")
        self._opening = Opening(plan.run_dir)

    # What the program may want to know.
    @property
    def process_id(self) -> int:
        return self.plan.process_id

    @property
    def num_processes(self) -> int:
        return self.plan.num_processes

    @property
    def attempt(self) -> int:
        return self.plan.attempt

    @property
    def run_dir(self) -> str:
        return self.plan.run_dir

    @property
    def last_step(self) -> int:
        return self.plan.last_step

    @property
    def seed(self) -> int:
        return self.plan.seed

    @property
    def coordinator(self) -> str:
        """`ip:port` where the processes of this attempt meet."""
        return self.plan.coordinator

    @property
    def config(self) -> dict[str, object]:
        """The run's `training` section."""
        return self.plan.config()

    @property
    def compile_cache_dir(self) -> Path:
        """A folder of this host that outlives the attempt."""
        return self.plan.compile_cache_dir

    def __enter__(self) -> Segment:
        self._install_stop_rule()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error
        try:
            if self._saver is not None:
                if error is None:
                    self._saver.wait()
                self._saver.close(None if error is None else LAST_SAVES_S)
        except (FencedOut, SaveFailed, DivergedError) as late:
            failure = late
        if isinstance(failure, DivergedError):
            self._event("diverged", step=self.step, reason=str(failure))
        self._end_metrics(fenced=isinstance(failure, FencedOut))
        if threading.current_thread() is threading.main_thread():
            self._stop_rule.uninstall()
        self.phase("other")
        self._events.close()
        if isinstance(failure, FencedOut):
            print(f"this attempt may not write any more and leaves: {failure}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_FENCED_OUT) from failure
        if failure is not None and is_infrastructure(failure):
            print(f"not the program's fault: {failure}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_NOTICED) from failure
        if failure is not error and failure is not None:
            raise failure

    def restore(self, state: Any) -> Any:
        """`state` with the values of the newest whole checkpoint, or unchanged if the run has none.

        Arrays keep the sharding, and all leaves the form, of the given `state`.

        Raises:
            MixedEnvironment: the checkpoint comes from where other bits come out, and that was not allowed.
            StateMismatch: names, shapes or dtypes of state and checkpoint differ.
            FencedOut: another attempt is open (the process ends with its exit code).
        """
        with self.phase("restore"):
            return self._restore(state)

    def _restore(self, state: Any) -> Any:
        opened = self._opening.result()
        self._require_open(opened.fence.attempt, opened.fence.open)
        leaves = leaves_of(state)
        self._environment = self._facts(leaves)
        for skipped in opened.skipped:
            self._event("skipped", step=skipped.step, attempt=skipped.attempt, reason=skipped.reason)
        found = opened.restored
        if found is None:
            self._event("restored", step=0, attempt=None, reason=opened.why_none)
            self._kept_step = 0
            return state
        self._mixed = self._is_mixed(found.manifest.environment, found.manifest.mixed, found.step)
        make_room(state, set(found.arrays))
        leaves = leaves_of(state)
        _check_names(set(leaves), set(found.arrays))
        state = placed_leaves(
            state, lambda n, leaf: placed(n, leaf, found.arrays[n]) if n in leaves else leaf
        )
        self.step = self.committed = self._kept_step = found.step
        self._event("restored", step=found.step, attempt=found.attempt, mixed=self._mixed)
        return state

    def calls(self, steps_per_call: int) -> Iterator[tuple[int, int]]:
        """(step, count) of each call up to the last step: do the updates step … step+count-1.

        `count` is `steps_per_call`, or 1 where a stop step or an earlier interruption lies in between.
        """
        if steps_per_call < 1:
            raise ValueError(f"a call makes at least one step, found steps_per_call={steps_per_call}")
        self._steps_per_call = steps_per_call
        first = self.step
        if self._kept_step is None:
            self._kept_step = first
        if first >= self.last_step:
            self._event("done", step=first)
        self._install_stop_rule()  # again: jax.distributed takes SIGTERM for itself when it starts
        while self.step < self.last_step:
            if self.step == first and self._stop_rule.stops(first, self._following(first)):
                self._leave_noticed(first)  # noticed before the first step: nothing to save
            step, count = self.step, self._following(self.step) - self.step
            self.phase("step")
            yield step, count
            self.step = step + count

    def steps(self) -> Iterator[int]:
        """Each step up to the last: do the update `step`."""
        for step, _ in self.calls(1):
            yield step

    def log(self, step: int, **values: Any) -> None:
        """Record numbers at `step`, such as the loss; only process 0's are kept.

        Raises:
            DivergedError: `loss` (or a name that ends in `_loss`) is not finite.
        """
        numbers = {name: _number(value) for name, value in values.items()}
        for name, number in numbers.items():
            if (name == "loss" or name.endswith("_loss")) and not math.isfinite(number):
                raise DivergedError(
                    f"{name} is {number} at step {step}: the training diverged. The newest checkpoint "
                    "before it stands; lower the learning rate or look at the data of that step, and fork "
                    "the run from there"
                )
        if self._leads:
            self._event("step", step=step, **numbers)

    def checkpoint(self, step: int, state: Any) -> None:
        """Call it at every border: saves at stop steps, after a preemption notice and at the end, else
        returns at once.

        At the end it returns when the checkpoint is committed. After a notice it does not return: the process
        ends with exit code 75.

        Raises:
            SaveFailed: the last checkpoint could not be committed.
            DivergedError: the state holds NaN.
        """
        if self._saver is not None:
            self._saver.check()
        last = step >= self.last_step
        noticed = not last and self._stop_rule.stops(step, self._following(step))
        if not (noticed or step in self._stop_steps):
            return
        with self.phase("save"):
            self.save(step, state)
            if noticed:
                self._leave_noticed(step)
            if last:
                self._open_saver(state).wait()
                self._event("done", step=step)
        if last:
            self.phase("other")

    def save(self, step: int, state: Any) -> None:
        """Begin to save now, whatever the stop steps are; the rest happens beside the training.

        A process that trains several runs begins all of their saves before it waits for one by `checkpoint`.
        """
        if step != self._kept_step:
            self._open_saver(state).save(step, leaves_of(state))
            self._kept_step = step

    def phase(self, name: Phase) -> _During:
        """Say what the process does from now on; as a `with` block it goes back afterwards."""
        before = self._phase
        if name != before:
            self._phase = name
            self._event("phase", phase=name)
        return _During(self, before)

    def event(self, name: str, /, **fields: object) -> None:
        """Note something of the program's own beside the events of the contract."""
        self._event(name, **fields)

    def _install_stop_rule(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._stop_rule.install()

    def _following(self, step: int) -> int:
        return step + call_length(step, self._steps_per_call, self.plan.stop_steps)

    def _leave_noticed(self, step: int) -> None:
        self._event("notice", step=step)
        try:
            if self._saver is not None:
                self._saver.wait()
        except SaveFailed as error:
            print(f"noticed, but not saved: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_NOTICED)

    def _open_saver(self, state: Any) -> Saver:
        if self._saver is None:
            plan = self.plan
            environment = self._environment or self._facts(leaves_of(state))
            target = SaveTarget(
                plan.run_dir,
                plan.attempt,
                plan.process_id,
                plan.num_processes,
                environment,
                self._mixed,
                plan.keep,
            )
            flush = self._metrics.flush if self._metrics is not None else lambda: None
            self._saver = Saver(target, self._event, before_commit=flush)
        return self._saver

    def _facts(self, leaves: dict[str, Any]) -> Facts:
        extra = self._extra() if callable(self._extra) else self._extra
        return fingerprint(self.num_processes, leaves, extra)

    def _is_mixed(self, before: Facts, already: bool, step: int) -> bool:
        differences = environment_difference(before, self._environment)
        if differences and not self.plan.allow_mixed:
            raise MixedEnvironment(
                f"the checkpoint of step {step} was trained where other bits come out: "
                f"{'; '.join(differences)}. Resume on the same, or allow it by name "
                "(allow_mixed) and the run is marked mixed"
            )
        return already or bool(differences)

    def _require_open(self, attempt: int, is_open: bool) -> None:
        if attempt == self.attempt and is_open:
            return
        if attempt == 0:
            raise ContractError(
                f"{self.run_dir} has no open attempt: a run opens attempt {self.attempt} before it starts"
            )
        state = "open" if is_open else "closed"
        raise FencedOut(
            f"this is attempt {self.attempt}, but attempt {attempt} is the newest and it is {state}"
        )

    def _event(self, event: str, /, **fields: object) -> None:
        record = self._events.write(event, **fields)
        if event == "commit" and isinstance(step := fields["step"], int):
            self.committed = max(self.committed, step)
        if self._metrics is None:
            return
        if event == "step":
            record = {name: value for name, value in record.items() if name != "event"}
        self._metrics.add(record)

    def _end_metrics(self, fenced: bool) -> None:
        if self._metrics is None:
            return
        self._metrics.close()
        if fenced:  # what a fenced-out attempt says is not read by anybody
            return
        try:
            self._metrics.flush()
        except Exception as error:  # everything up to the last commit is there already
            print(f"the last metrics could not be written: {error}", file=sys.stderr, flush=True)


def _number(value: Any) -> float:
    """A plain number of a Python, NumPy or JAX scalar; whole numbers stay whole."""
    item = value.item() if hasattr(value, "item") else value
    return item if isinstance(item, int | float) else float(item)


def _check_names(wanted: set[str], found: set[str]) -> None:
    if wanted != found:
        missing, extra = sorted(wanted - found)[:5], sorted(found - wanted)[:5]
        raise StateMismatch(
            f"state and checkpoint have other names: only in the program {missing}, "
            f"only in the checkpoint {extra}. Was the model or the optimizer changed?"
        )
