"""What the flow costs a training: the trainer's own time in steps, and what a border costs it.

Ours: a run of 20 segments by the flow, with a checkpoint at the end of each. By hand: the same trainer with the same
steps, started over SSH as one process on the same kind of host, with one checkpoint at its end: the limit.

On an emulated host as on a TPU VM nobody else computes: it has the first core for itself, while the flow, the Prefect
server, the emulated cloud, the storage server and this benchmark share the others, in both cases. What runs on the
host beside the trainer (its supervisor and SSH server, and the trainer's own saving in the background) is part of what
is measured. Nothing is evaluated. Both in turns, on an otherwise idle machine; figures are medians, in seconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.bench import by_hand
from deployments.bench.lab import BenchFailed, Lab, machine, median, open_lab, parser, say, tell
from deployments.bench.timeline import Event, border_seconds, phase_seconds, trainer_events
from tpu.checkpoint.digest import run_digest
from tpu.runs.config import RunConfig, load_run_config

GOAL = 1.03
CONFIG = Path("deployments/runs/icl.yaml")
SEGMENTS = 20
# Some 80 steps a second: a border every 3 s, where real runs have minutes between them.
STEPS, SHORT_STEPS = 5200, 800


def main() -> None:
    arguments = parser("overhead", __doc__)
    arguments.add_argument("--repetitions", type=int, help="pairs of trainings (default 3, short 1)")
    arguments.add_argument("--steps", type=int, help=f"steps of each (default {STEPS}, short {SHORT_STEPS})")
    chosen = arguments.parse_args()
    repetitions = chosen.repetitions or (1 if chosen.short else 3)
    steps = chosen.steps or (SHORT_STEPS if chosen.short else STEPS)
    about = machine()
    ours: list[list[Event]] = []
    bare: list[list[Event]] = []
    say("starting the Prefect server and the emulated Cloud TPU")
    with open_lab(hosts_alone=True) as lab:
        warm_up(lab, steps)
        for number in range(1, repetitions + 1):
            flow, hand = (configuration(f"{how}-{number}", steps) for how in ("overhead", "by-hand"))
            ours.append(train_by_flow(lab, flow))
            say(f"{number} of {repetitions}: by the flow {step_seconds(ours[-1]):.2f} s in steps")
            bare.append(train_by_hand(lab, hand))
            say(f"{number} of {repetitions}: by hand     {step_seconds(bare[-1]):.2f} s in steps")
            if len({run_digest(lab.run_dir(config.name), steps, prefix="") for config in (flow, hand)}) != 1:
                raise BenchFailed("the two trainings have other parameters: they are not the same work")
    tell(figures(ours, bare, steps) | {"machine": about})


def figures(ours: Sequence[list[Event]], bare: Sequence[list[Event]], steps: int) -> dict[str, Any]:
    flow_s, hand_s = [step_seconds(one) for one in ours], [step_seconds(one) for one in bare]
    borders = [seconds for one in ours for seconds in border_seconds(one)]
    return {
        "bench": "overhead",
        "ratio": round(median(flow_s) / median(hand_s), 4),
        "goal": GOAL,
        "flow_step_s": median(flow_s),
        "by_hand_step_s": median(hand_s),
        "border_blocked_s": median(borders),
        "border_blocked_longest_s": round(max(borders), 4),
        "borders_share_of_step_time": round(
            median([sum(border_seconds(one)) for one in ours]) / median(flow_s), 5
        ),
        "ratio_with_borders": round(
            median([step_seconds(one) + sum(border_seconds(one)) for one in ours]) / median(hand_s), 4
        ),
        "each_flow_step_s": [round(value, 3) for value in flow_s],
        "each_by_hand_step_s": [round(value, 3) for value in hand_s],
        "segments": SEGMENTS,
        "steps": steps,
        "repetitions": len(ours),
    }


def configuration(name: str, steps: int) -> RunConfig:
    """The demo's training, cut into 20 segments."""
    changes = {"name": name, "steps": steps, "checkpoints.every": steps // SEGMENTS, "evaluate": "never"}
    return load_run_config(CONFIG, changes)


def whole(config: RunConfig) -> RunConfig:
    """The same training as one segment."""
    rule = config.checkpoints.model_copy(update={"every": config.steps})
    return config.model_copy(update={"checkpoints": rule})


def step_seconds(events: Sequence[Event]) -> float:
    """The trainer's time in steps, by its own events."""
    return phase_seconds(events, events[-1]["t"]).get("step", 0.0)


def warm_up(lab: Lab, steps: int) -> None:
    """Train a little once, so that the bucket has the compiled program."""
    config = configuration("overhead-warm-up", steps)
    train_by_hand(lab, config.model_copy(update={"steps": steps // SEGMENTS}))


def train_by_flow(lab: Lab, config: RunConfig) -> list[Event]:
    with lab.flow(config) as flow:
        flow.wait()
    return trainer_events(lab.run_dir(config.name), attempt=1)


def train_by_hand(lab: Lab, config: RunConfig) -> list[Event]:
    return asyncio.run(_train_by_hand(lab, whole(config)))


async def _train_by_hand(lab: Lab, config: RunConfig) -> list[Event]:
    connection = lab.connection
    async with by_hand.bare_slice(connection, config, config.name) as bare:
        await by_hand.bring_compiled_programs(bare, connection.bucket)
        _, events = await by_hand.train(bare, config, lab.run_dir(config.name))
    return events


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))
