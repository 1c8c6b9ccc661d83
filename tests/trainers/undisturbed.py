"""What the NumPy trainer comes to when nobody disturbs it, computed here and now."""

from __future__ import annotations

import numpy as np

from tests.trainers.numpy_trainer import initial_state, update
from tpu.checkpoint.shards import Shard
from tpu.checkpoint.tree import leaves_of


def undisturbed(
    seed: int, steps: int, processes: int = 1
) -> tuple[dict[str, np.ndarray], list[tuple[int, float]]]:
    """Every array by name, whole, after so many steps; and the losses of process 0 by step."""
    states = [initial_state(seed, process, processes) for process in range(processes)]
    losses = []
    for step in range(steps):
        done = [update(state, seed, step, process, processes) for process, state in enumerate(states)]
        states = [state for state, _ in done]
        losses.append((step + 1, done[0][1]))
    leaves = [leaves_of(state) for state in states]
    arrays = {
        # Each process holds its own rows.
        name: np.concatenate([part[name].data for part in leaves])
        if isinstance(leaf, Shard)
        else np.asarray(leaf)
        for name, leaf in leaves[0].items()
    }
    return arrays, losses
