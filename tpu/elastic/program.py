"""What is trained, as a member sees it: gradients of work units, and what their mean does to the state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tpu.elastic.frames import bytes_of


class Program(Protocol):
    """A training whose step is cut into `units` work units. All of it is a function of (state, step, unit) alone.

    A gradient is one vector of `size` float32 numbers, the unit's loss last. Two members, or one member twice, must
    come to the same bits: so a unit is one compiled program, run by itself on devices of one shape.
    """

    size: int
    units: int

    def initial(self) -> Any:
        """The state before the first step."""
        ...

    def gradient(self, state: Any, step: int, unit: int) -> np.ndarray:
        """Mean gradient and loss over the unit's part of the batch of a step; nobody writes into it later."""
        ...

    def apply(self, state: Any, step: int, mean: np.ndarray) -> Any:
        """The state after the step, complete when it returns. `mean` and the state given are left as they are, and
        the new state keeps no part of `mean`."""
        ...

    def arrays(self, state: Any) -> dict[str, np.ndarray]:
        """The state as named arrays in host memory."""
        ...

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """The state again."""
        ...


def state_hash(arrays: Mapping[str, np.ndarray]) -> str:
    """A hash of names, types, shapes and bytes: the same for two states that are the same."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(bytes_of(array))
    return digest.hexdigest()
