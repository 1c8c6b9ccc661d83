"""One slice's part in a run over several slices: what a program on its host does, from its start to its end.

    from tpu.elastic import part

    with part.start() as own:
        program = MyProgram(own.units)      # see tpu.elastic.program
        own.train(program)

It takes the newest checkpoint, finds the coordinator or becomes it, and takes part until the last step is committed.
It ends with the codes of the segment contract: 0 finished; 75 start me again as I am. A JAX program is spared even
this: see tpu.train.elastic.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tpu.checkpoint.manifest import environment_difference
from tpu.checkpoint.retry import StorageUnavailable
from tpu.checkpoint.save import DivergedError, is_infrastructure
from tpu.elastic.control import Out
from tpu.elastic.member import Hooks, Left, Settings, take_part
from tpu.elastic.place import Finder
from tpu.elastic.program import Program
from tpu.elastic.rules import Options
from tpu.elastic.saving import Saving
from tpu.elastic.serving import Serving
from tpu.runtime.events import EventLog
from tpu.runtime.fingerprint import MixedEnvironment, fingerprint
from tpu.runtime.notice import OneProcess
from tpu.runtime.opening import Opening
from tpu.runtime.plan import ContractError, Plan
from tpu.runtime.segment import EXIT_NOTICED

Facts = Mapping[str, str]
# How often a member that waits for others says that it lives.
WAITING_S = 5.0
# A member that is done serves the others as coordinator for so long at most.
LAST_SERVICE_S = 20.0


@dataclass(frozen=True)
class Role:
    """What the flow says of a slice's part: `name` among the `names` of all, on the TPU node `node`.

    Training begins when all are there, or after `wait_s` with `least` of them. One that others wait for longer than
    `stuck_s` is given up; every `hash_every` steps all compare their state.
    """

    name: str
    names: tuple[str, ...]
    node: str
    units: int
    unit_devices: int = 1
    least: int = 1
    wait_s: float = 600.0
    stuck_s: float = 60.0
    hash_every: int = 100
    log_every: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Role:
        """From a program's config.json. Raises ContractError if it has none."""
        values = config.get("elastic")
        if not isinstance(values, dict):
            raise ContractError(
                "this program takes part in a run with mode: elastic, and config.json has no `elastic`"
            )
        return cls(**{**values, "names": tuple(values["names"])})

    @property
    def title(self) -> str:
        """As others know it: a slice that was made anew is another one."""
        return f"{self.name} on {self.node}"


def start() -> Part:
    """Begin this slice's part; use it as a context manager, before heavy imports: the newest checkpoint is fetched
    beside them.

    Raises ContractError if the program was not started by such a run.
    """
    return Part(Plan.from_environment())


class Part:
    """Made by `start`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config = plan.config()
        self.role = Role.of(self.config)
        if plan.num_processes > 1:
            raise ContractError(f"a slice takes part with one host, found {plan.num_processes}")
        self._events = EventLog(plan.events_path)
        self._rule = OneProcess()
        self._phase = ""
        self._in, self._committed, self._waited_at = False, 0, 0.0
        self._lock = threading.Lock()
        self._warm: Callable[[], None] = lambda: None
        self._saving: Saving | None = None
        self._finder: Finder | None = None
        self.tell("start", attempt=plan.attempt, process=0)
        self.phase("start")
        self._opening = Opening(plan.run_dir)

    @property
    def units(self) -> int:
        return self.role.units

    @property
    def unit_devices(self) -> int:
        return self.role.unit_devices

    @property
    def seed(self) -> int:
        return self.plan.seed

    @property
    def compile_cache_dir(self) -> Path:
        return self.plan.compile_cache_dir

    def __enter__(self) -> Part:
        self._rule.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saving is not None:
            self._saving.close()
        self._serve_the_others(error)
        if isinstance(error, DivergedError):
            self.tell("diverged", step=0, reason=str(error))
        if isinstance(error, Out) and error.bad:
            self.tell("bad", reason=str(error))
        self.phase("other")
        self._rule.uninstall()
        self._events.close()
        if isinstance(error, Left):
            raise SystemExit(EXIT_NOTICED) from error
        if isinstance(error, StorageUnavailable) or is_infrastructure(error):
            say(f"not the program's fault: {error}")
            raise SystemExit(EXIT_NOTICED) from error
        if isinstance(error, Out) and not error.differs:
            say(f"the others go on without this slice: {error}")
            raise SystemExit(EXIT_NOTICED) from error

    def train(
        self,
        program: Program,
        environment: Facts | Callable[[], Facts] = {},  # noqa: B006
        warm: Callable[[], None] = lambda: None,
    ) -> Any:
        """Take part to the last step, and return the final state once it is committed.

        `environment` has further facts that change the bits: all slices have to agree in them. `warm` is called in a
        thread of its own once this slice takes part, when everything is compiled.

        Raises:
            MixedEnvironment: the checkpoint comes from where other bits come out, and that was not allowed.
            DivergedError: the loss is no number any more.
            Out: this slice would compute, or has computed, other numbers than the others.
        """
        plan, role = self.plan, self.role
        extra = environment() if callable(environment) else environment
        facts = fingerprint(
            1, {}, {**extra, "work units": f"{role.units} on {role.unit_devices} device(s) each"}
        )
        state, step, mixed = self._restore(program, facts)
        if step >= plan.last_step:
            self.tell("commit", step=step)  # perhaps nobody has heard of it
            self.tell("done", step=step)
            return state
        self._warm = warm
        host = own_address(os.environ)
        finder = self._finder = Finder(plan.run_dir, host, lambda key: self._serve(host, key))
        saving = self._saving = Saving(
            plan, program.arrays, facts, mixed, self.tell, role.log_every, finder.is_current
        )
        settings = Settings(
            slice=role.title,
            key=self._key(finder),
            last_step=plan.last_step,
            coordinator=finder,
            host=host,
            hash_every=role.hash_every,
            stop_steps=frozenset(plan.stop_steps),
            facts=facts,
            committed=step,
        )
        hooks = Hooks(
            phase=self._on_phase,
            applied=self._on_applied,
            followed=lambda step, mean: saving.log(step + 1, float(mean[-1])),
            save=saving.save,
            leads=saving.lead,
            committed=self._on_committed,
            in_step=self._on_in_step,
            noticed=lambda: self._rule.stops(0, 0),
            hand_on=saving.hand_on,
            take=saving.take,
        )
        self.phase("compile")
        try:
            state = take_part(program, state, step, settings, hooks)
        except Left:
            self.tell("notice", step=self._committed)
            raise
        self.tell("done", step=plan.last_step)
        return state

    def _restore(self, program: Program, facts: Facts) -> tuple[Any, int, bool]:
        self.phase("restore")
        opened = self._opening.result()
        for skipped in opened.skipped:
            self.tell("skipped", step=skipped.step, attempt=skipped.attempt, reason=skipped.reason)
        if (found := opened.restored) is None:
            return program.initial(), 0, False
        differences = environment_difference(found.manifest.environment, facts)
        if differences and not self.plan.allow_mixed:
            raise MixedEnvironment(
                f"the checkpoint of step {found.step} was trained where other bits come out: "
                f"{'; '.join(differences)}. Resume on the same, or allow it by name (allow_mixed) and the run is "
                "marked mixed"
            )
        return program.from_arrays(found.arrays), found.step, found.manifest.mixed or bool(differences)

    def _key(self, finder: Finder) -> str:
        while True:
            try:
                return finder.place().key
            except OSError as error:
                say(str(error))
                time.sleep(1.0)

    def _serve(self, host: str, key: str) -> Serving:
        role = self.role
        options = Options(
            units=role.units,
            expect=len(role.names),
            names=role.names,
            least=role.least,
            form_s=role.wait_s,
            stuck_s=role.stuck_s,
            last_step=self.plan.last_step,
        )
        self.tell("coordinates", slice=role.name)
        return Serving(self.plan.run_dir, host, key, options, self._on_coordinator)

    def _serve_the_others(self, error: BaseException | None) -> None:
        """The coordinator's members still hear from it what they need to end."""
        ours = self._finder.ours if self._finder is not None else None
        if not isinstance(ours, Serving):
            return
        until = time.monotonic() + (LAST_SERVICE_S if error is None else 0.0)
        while not ours.alone and time.monotonic() < until:
            time.sleep(0.05)
        ours.end()

    # What happens, for whoever follows.
    def tell(self, event: str, /, **fields: object) -> None:
        """Note something in this host's events."""
        if event == "commit" and isinstance(step := fields["step"], int) and not self._is_news(step):
            return
        self._events.write(event, **fields)

    def phase(self, name: str) -> None:
        if name != self._phase:
            self._phase = name
            self.tell("phase", phase=name)

    def _is_news(self, committed: int) -> bool:
        with self._lock:
            news = committed > self._committed
            self._committed = max(self._committed, committed)
        return news

    def _on_committed(self, step: int) -> None:
        assert self._saving is not None
        self._saving.forget(step)
        self.tell("commit", step=step)

    def _on_in_step(self, step: int) -> None:
        if not self._in:
            self.tell("restored", step=step, attempt=None)
            threading.Thread(target=self._warm, name="warm", daemon=True).start()
        self._in = True
        self.phase("step")

    def _on_applied(self, step: int, state: Any, mean: np.ndarray) -> None:
        assert self._saving is not None
        if self._saving.failure is not None:
            raise self._saving.failure
        done, loss = step + 1, float(mean[-1])
        if not math.isfinite(loss):
            raise DivergedError(
                f"loss is {loss} at step {done}: the training diverged. The newest checkpoint before it stands; lower "
                "the learning rate or look at the data of that step, and fork the run from there"
            )
        self._saving.log(done, loss)
        if done % self.role.log_every == 0 or done == self.plan.last_step:
            self.tell("step", step=done, loss=loss)

    def _on_phase(self, name: str, step: int) -> None:
        if name == "following":
            self.phase("restore")
        elif name == "waiting" and not self._in:
            self.phase("idle")
            if (now := time.monotonic()) - self._waited_at >= WAITING_S:
                self._waited_at = now
                self.tell("waiting", step=step)

    def _on_coordinator(self, what: str, **fields: object) -> None:
        self.tell("members", what=what, **fields)


def own_address(environment: Mapping[str, str]) -> str:
    """Where the other slices reach this host: its internal address, as the flow tells it."""
    hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
    return hosts[int(environment["TPU_WORKER_ID"])]


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
