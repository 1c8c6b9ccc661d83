"""A training in NumPy whose numbers show any change in the order of sums: float32 of all sizes, and Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

State = dict[str, np.ndarray]


class NumpyProgram:
    """Least squares on random features. `pace(step, unit)` is called for each unit, to make a member slow."""

    def __init__(
        self, units: int, width: int = 6000, pace: Callable[[int, int], None] = lambda step, unit: None
    ):
        self.units, self.size = units, width + 1
        self._width, self._pace = width, pace

    def initial(self) -> State:
        draw = np.random.Generator(np.random.Philox(key=[7, 0]))
        weights = draw.standard_normal(self._width, np.float32)
        zeros = np.zeros(self._width, np.float32)
        return {"weights": weights, "mean": zeros, "square": zeros, "count": np.zeros((), np.int64)}

    def gradient(self, state: State, step: int, unit: int) -> np.ndarray:
        self._pace(step, unit)
        draw = np.random.Generator(np.random.Philox(key=[step, unit]))
        scales = np.exp(draw.standard_normal(self._width, np.float32) * 3)
        wanted = draw.standard_normal(self._width, np.float32)
        error = (state["weights"] - wanted) * scales
        return np.append(error, np.float32(np.square(error).mean())).astype(np.float32)

    def apply(self, state: State, step: int, mean: np.ndarray) -> State:
        gradient = mean[:-1]
        first = np.float32(0.9) * state["mean"] + np.float32(0.1) * gradient
        second = np.float32(0.99) * state["square"] + np.float32(0.01) * gradient * gradient
        moved = state["weights"] - np.float32(0.01) * first / (np.sqrt(second) + np.float32(1e-8))
        return {"weights": moved, "mean": first, "square": second, "count": state["count"] + 1}

    def arrays(self, state: State) -> State:
        return state

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> State:
        return dict(arrays)
