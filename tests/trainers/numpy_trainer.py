"""A small trainer through the real segment contract that starts fast and fails on demand.

Its numbers are a function of (seed, step). Knobs, all environment variables:
    NUMPY_STEP_SECONDS    how long a step lasts (default 0)
    NUMPY_SLOW_ATTEMPT    steps last so long only in this attempt (default: in every one)
    NUMPY_ARRAYS          number of parameter arrays (default 2)
    NUMPY_SIZE            elements an array (default 64)
    NUMPY_STEPS_PER_CALL  steps a call (default 1)
    NUMPY_LOG_EVERY       steps between logged losses (default 1)
    NUMPY_FAIL            exception@STEP, nan@STEP, nanstate@STEP, hang@STEP or exit:CODE@STEP
    NUMPY_FAIL_ATTEMPT    fail only in this attempt (default: in every one)
    NUMPY_NOTICE_SELF     1: send SIGTERM to itself before the first step
    NUMPY_IGNORE_TERM     1: SIGTERM does nothing, as in a program that never looks
    NUMPY_GATE            the file of a Gate, at which it waits for the test
With several processes each holds its own rows of the parameters.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.trainers.gate import pass_gate
from tpu.checkpoint.shards import Shard
from tpu.runtime import segment


@dataclass(frozen=True)
class Failure:
    """What goes wrong while the update `step` is made."""

    kind: str
    step: int
    code: int = 1

    @classmethod
    def from_environment(cls, attempt: int) -> Failure | None:
        text = os.environ.get("NUMPY_FAIL", "")
        if not text or os.environ.get("NUMPY_FAIL_ATTEMPT", str(attempt)) != str(attempt):
            return None
        what, _, step = text.partition("@")
        kind, _, code = what.partition(":")
        return cls(kind, int(step), int(code or 1))


def initial_state(seed: int, process: int, processes: int) -> dict[str, Any]:
    arrays = int(os.environ.get("NUMPY_ARRAYS", "2"))
    size = int(os.environ.get("NUMPY_SIZE", "64"))
    params = {
        f"w{i}": _own_rows(_noise(seed, 0, i, size * processes), process, processes) for i in range(arrays)
    }
    momenta = {name: _like(leaf, np.zeros_like(_data(leaf))) for name, leaf in params.items()}
    return {"params": params, "optimizer": {"momentum": momenta, "count": 0}}


def update(
    state: dict[str, Any], seed: int, step: int, process: int, processes: int
) -> tuple[dict[str, Any], float]:
    """One step of noisy descent on |w|² and the loss before it (of the rows of this process)."""
    loss = float(np.mean([np.mean(_data(leaf) ** 2) for leaf in state["params"].values()], dtype=np.float32))
    params, momenta = {}, {}
    for i, (name, leaf) in enumerate(sorted(state["params"].items())):
        data = _data(leaf)
        noise = _data(_own_rows(_noise(seed, step + 1, i, data.size * processes), process, processes))
        momentum = (
            np.float32(0.9) * _data(state["optimizer"]["momentum"][name]) + data + np.float32(0.1) * noise
        )
        momenta[name] = _like(leaf, momentum)
        params[name] = _like(leaf, data - np.float32(0.01) * momentum)
    return {
        "params": params,
        "optimizer": {"momentum": momenta, "count": state["optimizer"]["count"] + 1},
    }, loss


def fail(failure: Failure | None, step: int) -> None:
    if failure is None or failure.step != step:
        return
    print(f"failing on demand: {failure.kind} at step {step}", flush=True)
    if failure.kind == "exception":
        raise RuntimeError(f"the user's code failed on demand at step {step}")
    if failure.kind == "exit":
        os._exit(failure.code)
    if failure.kind == "hang":
        while True:
            time.sleep(3600)


def main() -> None:
    with segment.start() as seg:
        if os.environ.get("NUMPY_IGNORE_TERM") == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ.get("NUMPY_NOTICE_SELF") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        failure = Failure.from_environment(seg.attempt)
        slow = os.environ.get("NUMPY_SLOW_ATTEMPT", str(seg.attempt)) == str(seg.attempt)
        step_s = float(os.environ.get("NUMPY_STEP_SECONDS", "0")) if slow else 0.0
        log_every = int(os.environ.get("NUMPY_LOG_EVERY", "1"))
        state = seg.restore(initial_state(seg.seed, seg.process_id, seg.num_processes))
        print(f"attempt {seg.attempt} begins at step {seg.step}", flush=True)
        for step, count in seg.calls(int(os.environ.get("NUMPY_STEPS_PER_CALL", "1"))):
            loss = float("nan")
            for now in range(step, step + count):
                pass_gate(now)
                fail(failure, now)
                state, loss = update(state, seg.seed, now, seg.process_id, seg.num_processes)
                if failure is not None and failure.step == now and failure.kind.startswith("nan"):
                    _data(state["params"]["w0"])[0] = np.nan
                    loss = float("nan") if failure.kind == "nan" else loss
                if step_s:
                    time.sleep(step_s)
            if (step + count) % log_every == 0 or step + count == seg.last_step:
                seg.log(step + count, loss=loss)
            seg.checkpoint(step + count, state)
        print(f"attempt {seg.attempt} finished step {seg.step}", flush=True)


def _noise(seed: int, step: int, array: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, step, array]).standard_normal(size, dtype=np.float32)


def _own_rows(whole: np.ndarray, process: int, processes: int) -> Any:
    if processes == 1:
        return whole
    rows = whole.size // processes
    return Shard(whole[process * rows : (process + 1) * rows].copy(), (process * rows,), whole.shape)


def _data(leaf: Any) -> np.ndarray:
    return leaf.data if isinstance(leaf, Shard) else leaf


def _like(leaf: Any, data: np.ndarray) -> Any:
    return Shard(data, leaf.start, leaf.shape) if isinstance(leaf, Shard) else data


if __name__ == "__main__":
    sys.exit(main())
