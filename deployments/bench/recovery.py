"""From the death of a host to the first new step, beside the bare minimum.

Ours: a run is training on a spot v4-8; its host is killed (SIGKILL of every process on it, the cloud goes on saying
READY), and the flow finds out, replaces the slice and goes on from the newest commit. Provisioning takes no time of
its own. Bare: the same trainer is started by hand over SSH on a fresh host with the code there and its programs
compiled, and resumes from the same checkpoint: start, imports, restore, first step.

Two trainings, one after the other. `ratio` is that of the model of the paper (8 layers, width 128, batch 256), one step
a call: its start takes some 6 s here, as that of any real program on a TPU takes seconds. `demo` is the small model of
`make train`, whose whole start takes 2 s: what recovery costs beyond a start (`overhead_s`) is the same for both, and
most of it is the 1.4 s in which a host that refuses connections may still come back.

Ours and bare in turns, on an otherwise idle machine; figures are medians, in seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.bench import by_hand
from deployments.bench.lab import BenchFailed, Lab, machine, median, open_lab, parser, say, tell, until
from deployments.bench.timeline import recovery_parts, start_parts, trainer_events
from tpu.runs.config import RunConfig, load_run_config
from tpu.runs.event_log import load_events

GOAL = 1.5
RUNS = Path("deployments/runs")
WAIT_S = 180.0

Parts = dict[str, float]


@dataclass(frozen=True)
class Training:
    """What is trained: a file of RUNS with changes, of more steps than are ever done."""

    name: str
    file: str
    changes: Mapping[str, Any]

    def run(self, number: int | str) -> RunConfig:
        common = {"name": f"{self.name}-{number}", "steps": 20000, "evaluate": "never"}
        return load_run_config(RUNS / self.file, {**common, **self.changes})


# A border every 5 s or so.
PAPER = Training(
    "paper", "icl-paper.yaml",
    {"slice": {"accelerator_type": "v4-8", "zone": "us-central2-b"}, "checkpoints": {"every": 2},
     "steps": 1000, "training.steps_per_call": 1, "training.log_every": 1},
)  # fmt: skip
DEMO = Training("demo", "icl.yaml", {"checkpoints.every": 400})


def main() -> None:
    arguments = parser("recovery", __doc__)
    arguments.add_argument("--repetitions", type=int, help="pairs of measurements (default 5, short 1)")
    chosen = arguments.parse_args()
    repetitions = chosen.repetitions or (1 if chosen.short else 5)
    about = machine()
    say("starting the Prefect server and the emulated Cloud TPU")
    with open_lab(hosts_alone=False) as lab:
        demo = measure(lab, DEMO, repetitions)
        paper = measure(lab, PAPER, repetitions)
    result = {"bench": "recovery", "ratio": paper["ratio"], "goal": GOAL, **paper, "demo": demo}
    tell({**result, "repetitions": repetitions, "machine": about})


def measure(lab: Lab, training: Training, repetitions: int) -> dict[str, Any]:
    """Recover and start by hand in turns."""
    ours: list[Parts] = []
    bare: list[Parts] = []
    say(f"{training.name}: training once, to have the program compiled")
    warm_up(lab, training.run("warm-up"))
    for number in range(1, repetitions + 1):
        config = training.run(number)
        ours.append(recover(lab, config))
        say(f"{training.name} {number} of {repetitions}: recovery {total(ours[-1])}")
        bare.append(start_by_hand(lab, config))
        say(f"{training.name} {number} of {repetitions}: by hand  {total(bare[-1])}")
    seconds, limit = medians(ours), medians(bare)
    return {
        "ratio": round(seconds["total"] / limit["total"], 3),
        "overhead_s": round(seconds["total"] - limit["total"], 3),
        "recovery_s": seconds,
        "bare_s": limit,
        "each_recovery_s": [round(sum(parts.values()), 3) for parts in ours],
        "each_bare_s": [round(sum(parts.values()), 3) for parts in bare],
    }


def warm_up(lab: Lab, config: RunConfig) -> None:
    """Train up to a commit once, so that the bucket has the compiled program, as it has after the first attempt."""
    with lab.flow(config) as flow:
        until(lambda: lab.fence(config.name).newest() is not None, "the first commit", flow, WAIT_S)


def recover(lab: Lab, config: RunConfig) -> Parts:
    """Train to the first commit and a little on, kill the host, and wait for a commit of the next attempt."""
    with lab.flow(config) as flow:
        until(lambda: lab.fence(config.name).newest() is not None, "the first commit", flow, WAIT_S)
        time.sleep(1.0)  # into the next segment
        (node,) = [node["node"] for node in lab.emulator.nodes() if node["state"] == "READY"]
        killed = time.time()
        lab.emulator.kill_host(node)
        until(
            lambda: (newest := lab.fence(config.name).newest()) is not None and newest.attempt == 2,
            "a commit of the second attempt", flow, WAIT_S,
        )  # fmt: skip
    run_dir = lab.run_dir(config.name)
    return recovery_parts(killed, load_events(run_dir), trainer_events(run_dir, attempt=2))


def start_by_hand(lab: Lab, config: RunConfig) -> Parts:
    """Start the trainer on a fresh host, for the run that has just been left: it restores the same kind of commit."""
    return asyncio.run(_start_by_hand(lab, config))


async def _start_by_hand(lab: Lab, config: RunConfig) -> Parts:
    connection = lab.connection
    async with by_hand.bare_slice(connection, config, f"by-hand-{config.name}") as bare:
        await by_hand.bring_compiled_programs(bare, connection.bucket)
        began, events = await by_hand.train(bare, config, lab.run_dir(config.name), until_event="step")
    return start_parts(began, events)


def total(parts: Parts) -> str:
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    return f"{sum(parts.values()):.2f} s: {listed}"


def medians(measured: list[Parts]) -> Parts:
    """Median of each part, and of the totals (which is not the sum of the medians)."""
    parts = {name: median([one[name] for one in measured]) for name in measured[0]}
    return {"total": median([sum(one.values()) for one in measured]), **parts}


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as error:
        sys.exit(str(error))
