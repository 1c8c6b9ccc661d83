"""One trainer's loop for the pack benchmark, in a process of its own: `python -m deployments.bench.pack_loops FILE`.

FILE holds the trainings, as JSON: one is trained by the program of a run alone, several by that of a pack. Each line on
stdin is a number of steps to do; the answer is a line of JSON: the seconds that they took, and the losses of the last
step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tpu.train import mesh, pack_step, step
from tpu.train.settings import Training
from tpu.train.workloads import Configuration, make_workload

# (state, first step, steps) -> (state, losses of the last of them); the state that goes in is used up.
Call = Callable[[Any, int, int], tuple[Any, list[float]]]


def alone(training: Training) -> tuple[Any, Call]:
    """The program of a run: its first state, and a call of it."""
    workload, over = make_workload(Configuration(training, None)), mesh.slice_mesh()
    state, data = step.initial_state(workload), workload.load_data()
    program = step.lower_program(training, workload, over, state, data).compile()
    data = mesh.place(data, mesh.replicated(over))

    def call(state: Any, first: int, count: int) -> tuple[Any, list[float]]:
        state, result = program(state, data, *step.call_arguments(training.seed, first, count))
        return state, np.asarray(result.loss)[count - 1 : count].tolist()

    return mesh.place(state, mesh.replicated(over)), call


def packed(trainings: list[Training]) -> tuple[Any, Call]:
    """The program of a pack: its first state, and a call of it."""
    workloads, over = [make_workload(Configuration(one, None)) for one in trainings], pack_step.lane_mesh()
    state = pack_step.stacked([step.initial_state(workload) for workload in workloads])
    data, numbers = pack_step.data_of(workloads), pack_step.numbers_of(trainings)
    program = pack_step.lower_pack(trainings[0], workloads[0], over, state, data, numbers).compile()
    by_lane = pack_step.lane_sharding(over)
    data = pack_step.PackData(mesh.place(data.shared, mesh.replicated(over)), mesh.place(data.own, by_lane))
    numbers, lanes = mesh.place(numbers, by_lane), len(trainings)

    def call(state: Any, first: int, count: int) -> tuple[Any, list[float]]:
        where = pack_step.call_arguments([first] * lanes, [count] * lanes)
        state, result = program(state, data, numbers, *where)
        return state, np.asarray(result.loss)[count - 1].tolist()

    return mesh.place(state, by_lane), call


def main() -> None:
    trainings = [Training.model_validate(one) for one in json.loads(Path(sys.argv[1]).read_text())]
    state, call = packed(trainings) if len(trainings) > 1 else alone(trainings[0])
    steps_per_call, first, losses = trainings[0].steps_per_call, 0, []
    for line in sys.stdin:
        end, began = first + int(line), time.perf_counter()
        while first < end:
            count = min(steps_per_call, end - first)
            state, losses = call(state, first, count)
            first += count
        print(json.dumps({"seconds": time.perf_counter() - began, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
