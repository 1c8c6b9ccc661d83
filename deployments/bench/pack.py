"""k small trainings packed into one program beside the same ones alone: one after the other, and all at once.

Steps: the loops of the built-in JAX trainer after compiling, k programs alone and one of the pack, each in a process of
its own on the same cores. The pack's lanes are dealt out to as many CPU devices as there are cores, as to the two of a
v2 or v3 chip. In turns a round has all of them do the same steps: the pack; the k others one after the
other, each with the cores for itself; the k others at once. `ratio` is the pack's steps a second, summed over its
lanes, over those of the better of the other two; medians of all rounds. `agree` says how far a lane's loss is from that
of its training alone at step 100, at most, and relative to it.

Whole runs: the trainers themselves on a local storage server, from their start through compiling to the last commit,
with no compiled program at hand: `whole_ratio` is the pack's time against the better of the other two in the same
sense.

Trainings differ in learning rate and seed. On a CPU a core has always something to do, so in steps packing saves no
more than what a small program's many operations cost besides their arithmetic; what it saves in whole runs are k starts
and k compilations. An accelerator is mostly idle with a model of this size: there the steps should gain far more, up to
the lanes that fill it. That has not been measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from deployments.bench.lab import FOLDER, BenchFailed, machine, median, parser, say, tell
from tpu.checkpoint.fence import open_attempt, update_fence
from tpu.emulator.gcs import GcsServer
from tpu.train.packs import Member, check_together
from tpu.train.settings import Training

LANES, WARM_UP = 8, 100
GOAL = 1.0
PLACE = FOLDER / "pack"
BUCKET = "gs://relay-emulated"


def trainings(lanes: int, steps: int) -> list[Training]:
    """In-context regression with the small transformer of the sweep example, at `lanes` learning rates."""
    return [
        Training.model_validate(
            {
                "workload": {
                    "kind": "icl", "dimensions": 4, "examples": 8, "tasks": 64, "batch": 8,
                    "model": {"layers": 2, "width": 16, "heads": 2},
                },
                "optimizer": {"schedule": "triangle", "learning_rate": 1e-3 * 1.3**number},
                "schedule_steps": steps, "steps_per_call": 20, "log_every": 20, "seed": number,
            }
        )
        for number in range(lanes)
    ]  # fmt: skip


def devices(lanes: int) -> dict[str, str]:
    """JAX's CPU devices for a program of so many lanes: one has a single device."""
    shared = math.gcd(lanes, len(os.sched_getaffinity(0)))
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(shared)}


class Loop:
    """A process of pack_loops.py."""

    def __init__(self, name: str, wanted: Sequence[Training]) -> None:
        file = PLACE / f"{name}.json"
        file.write_text(json.dumps([one.model_dump(mode="json") for one in wanted]))
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployments.bench.pack_loops", str(file)],
            env=os.environ | devices(len(wanted)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(self, steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Wait for the answer to `begin`. Raises BenchFailed if the process has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchFailed(f"the loop {self._name} ended with {self._process.wait()}")
        return json.loads(line)

    def do(self, steps: int) -> dict[str, Any]:
        self.begin(steps)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_steps(wanted: Sequence[Training], rounds: int, steps: int) -> dict[str, Any]:
    """Steps a second, summed over all trainings, by how they were trained; and how far the losses are apart."""
    found: dict[str, list[float]] = {"packed": [], "one_after_another": [], "at_once": []}
    with contextlib.ExitStack() as stack:
        loops = [Loop("pack", wanted), *(Loop(f"alone-{i}", [one]) for i, one in enumerate(wanted))]
        for loop in loops:
            stack.callback(loop.close)
        # Compiles; not measured. After so few steps rounding has not grown yet.
        together, *apart = [loop.do(WARM_UP)["losses"] for loop in loops]
        agree = max(abs(one - other[0]) / other[0] for one, other in zip(together, apart, strict=True))
        pack, alone, lanes = loops[0], loops[1:], len(wanted)
        for number in range(rounds):
            found["packed"].append(lanes * steps / pack.do(steps)["seconds"])
            found["one_after_another"].append(lanes * steps / sum(one.do(steps)["seconds"] for one in alone))
            began = time.perf_counter()
            for one in alone:
                one.begin(steps)
            for one in alone:
                one.end()
            found["at_once"].append(lanes * steps / (time.perf_counter() - began))
            say(f"round {number + 1}: " + ", ".join(f"{how} {rates[-1]:.0f}" for how, rates in found.items()))
    return {"steps_per_s": found, "agree": agree}


@contextlib.contextmanager
def storage() -> Iterator[None]:
    server = GcsServer(PLACE / "objects", PLACE / "log")
    os.environ["STORAGE_EMULATOR_HOST"] = server.start()
    try:
        yield
    finally:
        server.stop()


def whole_seconds(wanted: Sequence[Training], how: str, number: int, steps: int) -> float:
    """Start all trainings as runs of `steps`, and wait for the last commit. Raises BenchFailed if one failed."""
    place = f"{how}-{number}"
    members = [
        Member(f"run-{lane}", f"{BUCKET}/{place}/runs/run-{lane}", 1, (steps // 2, steps), steps, one)
        for lane, one in enumerate(wanted)
    ]
    check_together(members)
    for member in members:
        update_fence(member.run_dir, lambda fence: open_attempt(fence, 1))
    began = time.perf_counter()
    if how == "packed":
        values = {"members": [member.to_values() for member in members]}
        finish([start("tpu.train.pack_trainer", place, "pack", members[0], values)])
    elif how == "one_after_another":
        for member in members:
            finish([start_alone(place, member)])
    else:
        finish([start_alone(place, member) for member in members])
    return time.perf_counter() - began


def start_alone(place: str, member: Member) -> subprocess.Popen[bytes]:
    return start("tpu.train.jax_trainer", place, member.name, member, member.training.model_dump(mode="json"))


def start(
    program: str, place: str, name: str, member: Member, config: dict[str, Any]
) -> subprocess.Popen[bytes]:
    folder = PLACE / place / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    environment = os.environ | {
        "HOME": str(folder),  # its own, so that it finds nothing that others have compiled
        **devices(len(config.get("members", [member]))),
        "RELAY_RUN_DIR": f"{BUCKET}/{place}/{name}/runs/{name}" if name == "pack" else member.run_dir,
        "RELAY_ATTEMPT": "1",
        "RELAY_STOP_STEPS": ",".join(map(str, member.stop_steps)),
        "RELAY_LAST_STEP": str(member.last_step),
        "RELAY_CONFIG": str(folder / "config.json"),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", program], env=environment, stdout=log, stderr=log)


def finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait() for process in processes]
    if any(codes):
        raise BenchFailed(f"trainers ended with {codes}; their logs are in {PLACE}")


def ratio_of(rates: dict[str, list[float]]) -> float:
    """The pack's median over the better one of the others'."""
    medians = {how: median(found) for how, found in rates.items()}
    return round(medians.pop("packed") / max(medians.values()), 3)


def main() -> None:
    arguments = parser("pack", __doc__)
    arguments.add_argument(
        "--lanes", type=int, default=LANES, help=f"trainings in the pack (default {LANES})"
    )
    arguments.add_argument("--rounds", type=int, help="rounds of steps (default 7, short 2)")
    arguments.add_argument(
        "--steps", type=int, help="steps of each training a round (default 1000, short 200)"
    )
    arguments.add_argument("--whole", type=int, help="rounds of whole runs (default 3, short 1)")
    chosen = arguments.parse_args()
    rounds, whole = chosen.rounds or (2 if chosen.short else 7), chosen.whole or (1 if chosen.short else 3)
    steps = chosen.steps or (200 if chosen.short else 1000)
    about = machine()
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    wanted = trainings(chosen.lanes, 2 * rounds * steps)
    say(f"{rounds} rounds of {steps} steps of {chosen.lanes} trainings, after compiling")
    inner = measure_steps(wanted, rounds, steps)
    rates: dict[str, list[float]] = {"packed": [], "one_after_another": [], "at_once": []}
    with storage():
        for number in range(whole):
            for how, found in rates.items():
                found.append(chosen.lanes * steps / whole_seconds(wanted, how, number, steps))
            say(f"whole runs {number + 1}: " + ", ".join(f"{how} {r[-1]:.0f}" for how, r in rates.items()))
    tell(
        {
            "bench": "pack",
            "ratio": ratio_of(inner["steps_per_s"]),
            "goal": GOAL,
            "whole_ratio": ratio_of(rates),
            "agree": float(f"{inner['agree']:.2g}"),
            "steps_per_s": {how: round(median(found), 1) for how, found in inner["steps_per_s"].items()},
            "whole_steps_per_s": {how: round(median(found), 1) for how, found in rates.items()},
            "lanes": chosen.lanes,
            "rounds": rounds,
            "steps": steps,
            "machine": about,
        }
    )


if __name__ == "__main__":
    main()
