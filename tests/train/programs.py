"""Small trainings that tests run, and the means to run them without a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpu.train.mesh import place, replicated, slice_mesh, state_shardings
from tpu.train.settings import Training
from tpu.train.step import call_arguments, initial_state, lower_program
from tpu.train.workloads import Configuration, make_workload

TINY_ICL: dict[str, Any] = {
    "workload": {
        "kind": "icl",
        "dimensions": 2,
        "examples": 4,
        "tasks": 4,
        "batch": 8,
        "model": {"layers": 1, "width": 8, "heads": 2},
    },
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    "steps_per_call": 5,
    "log_every": 5,
}


def tiny_icl(**changes: Any) -> Training:
    """A training of a second."""
    return Training.model_validate(TINY_ICL | changes)


@dataclass
class LocalRun:
    """A compiled training, its arrays on the devices of this process."""

    training: Training
    program: Any
    shardings: Any
    data: Any
    first_state: Any

    @classmethod
    def compiled(cls, training: Training) -> LocalRun:
        workload = make_workload(Configuration(training, None))
        mesh = slice_mesh()
        state, data = initial_state(workload), workload.load_data()
        compiled = lower_program(training, workload, mesh, state, data).compile()
        shardings = state_shardings(mesh, state, training.shard_parameters)
        return cls(training, compiled, shardings, place(data, replicated(mesh)), state)

    def run(self, counts: list[int], start: int = 0, state: Any = None) -> tuple[Any, np.ndarray]:
        """Calls of these lengths from `start` on; the state on the host afterwards and each step's loss."""
        placed = place(self.first_state if state is None else state, self.shardings)
        losses, step = [], start
        for count in counts:
            placed, result = self.program(placed, self.data, *call_arguments(self.training.seed, step, count))
            losses.append(np.asarray(result.loss)[:count])
            step += count
        return jax.tree.map(np.asarray, placed), np.concatenate(losses)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same leaves, byte for byte."""
    ones, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(ones) == len(others) and all(
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(ones, others, strict=True)
    )
