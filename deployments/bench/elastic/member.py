"""A member for `gaps.py`: units that are paced by sleeping, or a real computation. Tells when each step was applied."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpu.elastic.member import Hooks, Settings, take_part
from tpu.elastic.program import state_hash

ELEMENTS = 50_000


class Paced:
    """Gradients that cost no time but what a unit is to take; the sums are real."""

    size = ELEMENTS + 1

    def __init__(self, units: int, unit_s: float) -> None:
        self.units, self._unit_s = units, unit_s

    def initial(self) -> dict[str, np.ndarray]:
        return {"weights": np.zeros(ELEMENTS, np.float32)}

    def gradient(self, state: dict[str, np.ndarray], step: int, unit: int) -> np.ndarray:
        time.sleep(self._unit_s)  # in place of chips that compute: they take no core of this machine
        draw = np.random.Generator(np.random.Philox(key=[step, unit]))
        return draw.standard_normal(self.size, np.float32)

    def apply(self, state: dict[str, np.ndarray], step: int, mean: np.ndarray) -> dict[str, np.ndarray]:
        return {"weights": state["weights"] - np.float32(0.1) * mean[:-1]}

    def arrays(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return state

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(arrays)


def main(told: dict[str, Any]) -> None:
    """Take part as `told` and write a line for each step into a file of this slice."""
    folder, name = Path(told["folder"]), told["slice"]
    program = Paced(told["units"], told["unit_s"])
    with (folder / f"{name}-{told['life']}.jsonl").open("w") as out:

        def applied(step: int, state: Any, mean: np.ndarray) -> None:
            print(json.dumps({"t": time.time(), "step": step}), file=out, flush=True)

        settings = Settings(
            slice=name,
            key=told["key"],
            last_step=told["steps"],
            coordinator=lambda: ("127.0.0.1", told["port"]),
            hash_every=0,
        )
        state = take_part(program, program.initial(), 0, settings, Hooks(applied=applied))
        print(json.dumps({"t": time.time(), "hash": state_hash(program.arrays(state))}), file=out, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
