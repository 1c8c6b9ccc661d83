"""Boards of sweeps that nobody ran, as large as wanted."""

from __future__ import annotations

import math
import random

from tpu.sweeps.board import Board, Live
from tpu.sweeps.outcome import Outcome, State
from tpu.sweeps.trial import Trial
from tpu.sweeps.usage import SliceLife, Use

BEGAN = 1.8e9
RATE, WIDTH, SCHEDULE = (
    "training.optimizer.learning_rate",
    "training.workload.model.width",
    "training.optimizer.schedule",
)


def board_of(trials: int, slices: int = 4, price: float | None = 4.0, seed: int = 0) -> Board:
    """So many trials on slices of 4 chips, one chip each, one after the other; most have finished, some are pruned,
    one in 50 has failed, one in 100 diverged, the last 3 run."""
    draw, board = random.Random(seed), Board("loss", "minimize")
    free = [[BEGAN] * 4 for _ in range(slices)]
    for number in range(trials):
        rate = 10 ** draw.uniform(-4, -1)
        parameters = {
            RATE: rate,
            WIDTH: draw.choice([16, 32, 64]),
            SCHEDULE: draw.choice(["constant", "triangle"]),
        }
        trial = Trial(number, number, parameters, number % 3, f"many-{number:08x}")
        board.began[number] = trial
        if number >= trials - 3:
            board.live[number] = Live(10, 0.9, "slice-0-w0")
            continue
        state: State = "failed" if number % 50 == 7 else draw.choice(["finished", "finished", "pruned"])
        best = 0.2 + 0.1 * abs(math.log10(rate) + 2.5) + 0.02 * draw.random()
        curve = tuple(
            (10 * i, best + 0.8 * math.exp(-i / 8)) for i in range(1, 20 if state == "pruned" else 50)
        )
        value = 1e8 if number % 100 == 50 else curve[-1][1]
        where = min(range(slices * 4), key=lambda one: free[one // 4][one % 4])
        at = free[where // 4][where % 4]
        end = at + 30 + 2 * len(curve)
        free[where // 4][where % 4] = end + 3
        use = Use(f"slice-{where // 4}", (where % 4,), 1, 4, at, end, ((at + 8, end - 2),))
        board.ended[number] = Outcome(
            state, None if state == "failed" else value, ("loss",), curve[-1][0], 1, end - at,
            None if price is None else price * use.chip_hours / 4, "0" * 64, (use.slice,), curve[:3], ("f" * 64,), "",
            {"finished": "", "pruned": "median: it is worse", "failed": "exit code 3"}[state], end, curve, (use,),
        )  # fmt: skip
    return board


def lives_of(board: Board, now: float) -> dict[str, SliceLife]:
    return {use.slice: SliceLife(4, BEGAN - 20, now) for one in board.ended.values() for use in one.uses}
