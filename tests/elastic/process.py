"""A member in a process of its own, for tests; forked from one that has imported everything.

It writes its steps to a file, one JSON line each, and may end, stop or fail itself where a test says so.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainers.numpy_units import NumpyProgram
from tpu.elastic.control import Out
from tpu.elastic.member import Hooks, Settings, take_part
from tpu.elastic.program import state_hash


def main(told: dict[str, Any]) -> None:
    """Take part as `told`, see `tests.elastic.conftest.Members.start`."""
    folder = Path(told["folder"])
    os.dup2(os.open(folder / f"{told['slice']}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1)  # a test that fails shows where it hangs
    out = (folder / f"{told['slice']}-{os.getpid()}.jsonl").open("a")

    def write(**record: Any) -> None:
        out.write(json.dumps({"t": time.time(), **record}) + "\n")
        out.flush()

    def pace(step: int, unit: int) -> None:
        time.sleep(told.get("unit_s", 0))  # the work of a slow member
        hang = told.get("hang")
        if hang is not None and hang["slice"] == told["slice"] and step >= hang["step"]:
            threading.Event().wait()  # for ever, while other threads live

    program = make_program(told, pace)
    state, step = program.initial(), 0
    saved = sorted(folder.glob("saved-*.npz"), key=lambda path: int(path.stem.split("-")[1]))
    if saved:
        step = int(saved[-1].stem.split("-")[1])
        state = program.from_arrays(dict(np.load(saved[-1])))
    fault = Fault(told.get("fault"), told["slice"])

    def save(step: int, state: Any, committed: Any) -> None:
        def work() -> None:
            temporary = folder / f"writing-{os.getpid()}-{step}.npz"
            np.savez(temporary, **program.arrays(state))
            fault.at("saving", step)
            temporary.rename(folder / f"saved-{step}.npz")
            write(saved=step)
            committed()

        threading.Thread(target=work, daemon=True).start()

    settings = Settings(
        slice=told["slice"],
        key="a-key",
        last_step=told["steps"],
        coordinator=lambda: ("127.0.0.1", int((folder / "port").read_text())),
        report_s=told.get("report_s", 0.1),
        hash_every=told.get("hash_every", 5),
        stop_steps=frozenset(told.get("stop_steps", ())),
        facts={"program": told.get("program", "numpy")},
    )
    hooks = Hooks(
        phase=fault.at,
        applied=lambda step, state, mean: write(step=step, loss=float(mean[-1]).hex()),
        save=save if told.get("stop_steps") else None,
    )
    write(began=step)
    try:
        state = take_part(program, state, step, settings, hooks)
    except Out as error:
        write(out=str(error), final=error.final)
        return
    write(done=state_hash(program.arrays(state)))


def make_program(told: dict[str, Any], pace: Any) -> Any:
    if told.get("program") == "jax":
        from tests.elastic.jax_program import make

        return make(told["units"])
    if told.get("flip"):
        return Flipping(told["units"], told["flip"], pace)
    return NumpyProgram(told["units"], told.get("width", 6000), pace)


class Flipping(NumpyProgram):
    """A bad chip: after one step a bit of its state is another one."""

    def __init__(self, units: int, step: int, pace: Any) -> None:
        super().__init__(units, pace=pace)
        self._flip_at = step

    def apply(self, state: Any, step: int, mean: np.ndarray) -> Any:
        after = super().apply(state, step, mean)
        if step == self._flip_at:
            after["weights"].view(np.int32)[17] ^= 1
        return after


class Fault:
    """Ends or stops this process in a phase of a step."""

    def __init__(self, told: dict[str, Any] | None, slice_name: str) -> None:
        self._told = told if told is not None and told.get("slice", slice_name) == slice_name else None
        self._count = 0
        self._lock = threading.Lock()

    def at(self, phase: str, step: int) -> None:
        told = self._told
        if told is None or phase != told["phase"] or step < told["step"]:
            return
        with self._lock:
            self._count += 1
            due = self._count > told.get("after", 0)
        if due:
            os.kill(os.getpid(), signal.SIGSTOP if told.get("stop") else signal.SIGKILL)
