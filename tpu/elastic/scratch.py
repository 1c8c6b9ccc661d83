"""Arrays that are used again: fresh memory of this size costs as much as filling it."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

# Of each length so many are kept; more are in use at once only when a peer is a step ahead.
_KEPT_BYTES = 1 << 31


class Scratch:
    """Float32 arrays by length; any thread takes and gives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._bytes = 0

    def take(self, length: int) -> np.ndarray:
        """An array of that length, its content arbitrary."""
        with self._lock:
            free = self._free[length]
            if free:
                found = free.pop()
                self._bytes -= found.nbytes
                return found
        return np.empty(length, np.float32)

    def give(self, array: np.ndarray) -> None:
        """Take back an array that nobody uses any more."""
        with self._lock:
            if self._bytes + array.nbytes <= _KEPT_BYTES:
                self._free[array.size].append(array)
                self._bytes += array.nbytes
