"""The seeds of a step: numbers that depend on (seed, step, device) alone, for every generator that a step may use.

All generators are seeded anew at each step, so nothing depends on how often an attempt was cut: a resume at
step s seeds step s as an undisturbed training would. Their states are kept in checkpoints for people to read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Seeds:
    """One number for each generator; no two of them start alike."""

    xla: int  # below 2^63: torch_xla keeps it as an unsigned 64-bit number
    torch: int
    numpy: int  # below 2^32: what numpy.random.seed takes


def step_seeds(seed: int, step: int, device: int = 0) -> Seeds:
    """Seeds of the update after `step` updates. Under SPMD all devices are one: the batch is drawn as a whole, and
    each device takes its part, so `device` is 0 however many there are."""
    xla, torch, numpy = np.random.SeedSequence([seed, step, device]).generate_state(3, np.uint64)
    return Seeds(int(xla) >> 1, int(torch) >> 1, int(numpy) >> 32)
