"""A NumPy training cut into work units that takes part in an elastic run: `python -m tests.trainers.units`.

Knobs, all environment variables:
    UNITS_WIDTH     numbers of the state's weights (default 2000)
    UNITS_SECONDS   how long a unit lasts (default 0)
    UNITS_FAIL      SLICE:exception@STEP, SLICE:hang@STEP or SLICE:nan@STEP, in the slice's first attempt only;
                    `all` for every slice and attempt
    NUMPY_GATE      the file of a Gate, at which every unit waits for the test
"""

from __future__ import annotations

import os
import time

import numpy as np

from tests.trainers.gate import pass_gate
from tests.trainers.numpy_units import NumpyProgram, State
from tpu.elastic import part, tree


class Units(NumpyProgram):
    """`slice_name` and `attempt` are whose faults it has."""

    def __init__(self, units: int, slice_name: str = "", attempt: int = 0) -> None:
        super().__init__(units, int(os.environ.get("UNITS_WIDTH", "2000")))
        self._seconds = float(os.environ.get("UNITS_SECONDS", "0"))
        who, _, fault = os.environ.get("UNITS_FAIL", "").partition(":")
        kind, _, step = fault.partition("@")
        hit = who == "all" or (who == slice_name and attempt == 1)
        self._fault, self._fault_step = (kind, int(step)) if hit else ("", 0)
        self._warm = False

    def gradient(self, state: State, step: int, unit: int) -> np.ndarray:
        if self._warm:  # not what is only computed to be compiled
            pass_gate(step)
            time.sleep(self._seconds)
            if self._fault and step == self._fault_step:
                self._fail(step)
        gradient = super().gradient(state, step, unit)
        if self._warm and self._fault == "nan" and step == self._fault_step:
            gradient[-1] = np.nan
        return gradient

    def apply(self, state: State, step: int, mean: np.ndarray) -> State:
        self._warm = True
        return super().apply(state, step, mean)

    def _fail(self, step: int) -> None:
        if self._fault == "exception":
            raise RuntimeError(f"the user's code failed on demand at step {step}")
        while self._fault == "hang":
            time.sleep(3600)


def alone(units: int, steps: int) -> tuple[State, list[tuple[int, float]]]:
    """What the training comes to, computed here and now by one: the final state, and each step's loss."""
    program = Units(units)
    state, losses = program.initial(), []
    for step in range(steps):
        total = tree.sum_node(
            (0, units), lambda unit, state=state, step=step: program.gradient(state, step, unit), np.add
        )
        mean = total * np.float32(1.0 / units)
        state = program.apply(state, step, mean)
        losses.append((step + 1, float(mean[-1])))
    return state, losses


def main() -> None:
    with part.start() as own:
        own.train(Units(own.units, own.role.name, own.plan.attempt))


if __name__ == "__main__":
    main()
