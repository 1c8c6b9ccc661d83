"""States and savers for the tests of saving and restoring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tpu.checkpoint.keep import KEEP_ALL, KeepRule
from tpu.checkpoint.save import SaveLimits, Saver, SaveTarget
from tpu.checkpoint.tree import leaves_of

QUICK = SaveLimits(commit_interval_s=0.0, parts_deadline_s=20.0, parts_poll_s=0.01)


def state_at(step: int) -> dict[str, Any]:
    """A small state of several dtypes and shapes whose bytes are a function of `step`."""
    random = np.random.default_rng(step)
    return {
        "params": {"w": random.standard_normal((3, 5), dtype=np.float32), "b": np.float32(step)},
        "optimizer": [random.integers(0, 9, 4), {"count": step, "on": step % 2 == 0}],
    }


class Events:
    """Collects what a saver reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: str, /, **fields: object) -> None:
        self.seen.append((event, fields))

    def of(self, kind: str) -> list[dict[str, object]]:
        return [fields for event, fields in self.seen if event == kind]


@contextmanager
def saver_of(
    run_dir: str,
    attempt: int = 1,
    process: int = 0,
    processes: int = 1,
    keep: KeepRule = KEEP_ALL,
    events: Events | None = None,
    limits: SaveLimits = QUICK,
) -> Iterator[Saver]:
    target = SaveTarget(run_dir, attempt, process, processes, {"threads": "1"}, keep=keep)
    saver = Saver(target, events or Events(), limits=dataclasses.replace(limits))
    try:
        yield saver
    finally:
        saver.close()


def save_steps(run_dir: str, *steps: int, attempt: int = 1, keep: KeepRule = KEEP_ALL) -> Events:
    """Commit `state_at(step)` for each step; returns what was reported."""
    events = Events()
    with saver_of(run_dir, attempt, keep=keep, events=events) as saver:
        for step in steps:
            saver.save(step, leaves_of(state_at(step)))
            saver.wait()
    return events


def assert_holds(arrays: Any, step: int) -> None:
    """The restored arrays are `state_at(step)`, byte for byte."""
    wanted = leaves_of(state_at(step))
    assert set(arrays) == set(wanted)
    for name, value in wanted.items():
        value = np.asarray(value)
        assert arrays[name].dtype == value.dtype
        assert arrays[name].shape == value.shape
        assert arrays[name].tobytes() == value.tobytes(), name
