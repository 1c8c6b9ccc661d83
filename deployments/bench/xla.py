"""Steps a second of the PyTorch/XLA trainer's step beside two ordinary loops, same model and data, in turns.

Naive: a PyTorch/XLA loop as most are written, nn.Module, torch.optim.Adam, `torch_xla.sync()`, and the loss fetched
each step. Eager: the same in plain PyTorch on the CPU, without XLA. Ours: one graph, traced once, losses fetched at
log steps. All in one process on one core with one thread, as an emulated host has.

`ratio` is ours over naive, medians of all rounds; `recompiled` are graphs that were compiled after the warm-up.

What to expect on a TPU, where this has not been measured: `host_ms` is the time that Python takes until a step is
with XLA, and it stays whatever the chip. The naive loop traces each step anew and then waits for its loss, so that
Python and the chip work in turns: its step takes the sum of both. Ours runs ahead of the chip: its step takes the
longer of both. So while the chip's part is shorter than the tracing the ratio is larger than here, where both
share one slow core; it falls towards 1 as the chip's part grows beyond it. The eager loop has no counterpart on a
TPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from deployments.bench.lab import BenchFailed, machine, parser, say, tell

GOAL = 1.5
PYTHON = Path(".venv-xla/bin/python")


def main() -> None:
    arguments = parser("xla", __doc__)
    arguments.add_argument("--rounds", type=int, help="turns of each loop (default 7, short 2)")
    arguments.add_argument("--steps", type=int, help="steps a turn (default 100, short 40)")
    chosen = arguments.parse_args()
    rounds, steps = chosen.rounds or (2 if chosen.short else 7), chosen.steps or (40 if chosen.short else 100)
    about = machine()
    if not PYTHON.exists():
        raise BenchFailed(f"{PYTHON} is not there: `make bench BENCH=xla` (or `make setup-xla`) makes it")
    say(f"{rounds} rounds of {steps} steps of each loop, after compiling (about a minute)")
    core = str(min(os.sched_getaffinity(0)))
    worker = subprocess.run(
        ["taskset", "-c", core, PYTHON, "-m", "deployments.bench.xla_loops", str(rounds), str(steps)],
        env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    figures = json.loads(worker.stdout.decode().splitlines()[-1])
    rates = figures["steps_per_s"]
    tell(
        {
            "bench": "xla",
            "ratio": round(rates["ours"] / rates["naive"], 3),
            "goal": GOAL,
            "over_eager": round(rates["ours"] / rates["eager"], 3),
            **figures,
            "rounds": rounds,
            "steps": steps,
            "machine": about,
        }
    )


if __name__ == "__main__":
    main()
