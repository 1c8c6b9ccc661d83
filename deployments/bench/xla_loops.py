"""The loops of the benchmark `xla`, run by it in .venv-xla: arguments are rounds and steps; one JSON object last."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from tpu.train import xla_device
from tpu.train.randomness import step_seeds
from tpu.train.settings import Training
from tpu.train.torch_workloads import make_model, make_torch_workload
from tpu.train.xla_step import initial_arrays, place_state, step_program

CONFIG = Path("deployments/runs/icl.yaml")

# Makes so many steps; returns the seconds, of all steps, that Python takes until a step is with XLA.
Loop = Callable[[int], float]


def ours(training: Training, devices: xla_device.Devices) -> Loop:
    """The step of the trainer; the loss is fetched at log steps."""
    workload = make_torch_workload(training, None)
    model, data = make_model(training, workload), devices.place(workload.load_data())
    state = place_state(devices, training, initial_arrays(model))
    program = step_program(training, workload, model, devices, state, data)
    done = 0

    def steps(count: int) -> float:
        nonlocal state, done
        host = 0.0
        for _ in range(count):
            began = time.thread_time()
            devices.seed(step_seeds(training.seed, done).xla)
            *values, loss, _ = program([*state.values(), *data.values()])
            state, done = dict(zip(state, values, strict=True)), done + 1
            host += time.thread_time() - began
            if done % training.log_every == 0:
                loss.item()
        devices.wait()
        return host

    return steps


def ordinary(training: Training, device: torch.device, sync: Callable[[], object]) -> Loop:
    """nn.Module and torch.optim.Adam; the loss is fetched each step."""
    workload = make_torch_workload(training, None)
    model = make_model(training, workload).to(device)
    data = {name: torch.from_numpy(array).to(device) for name, array in workload.load_data().items()}
    adam = torch.optim.Adam(model.parameters(), lr=training.optimizer.learning_rate)

    def steps(count: int) -> float:
        host = 0.0
        for _ in range(count):
            # By the clock: nothing else runs meanwhile, and the backward pass is traced in a thread of its own.
            began = time.perf_counter()
            loss = workload.loss(model, workload.batch(data, device))
            adam.zero_grad()
            loss.backward()
            adam.step()
            sync()
            host += time.perf_counter() - began
            loss.item()
        return host

    return steps


def main() -> None:
    rounds, steps = int(sys.argv[1]), int(sys.argv[2])
    xla_device.prepare(Path(tempfile.mkdtemp()))
    import torch_xla  # not before what it reads is set

    torch.manual_seed(0)
    training = Training.model_validate(yaml.safe_load(CONFIG.read_text())["training"])
    devices = xla_device.open_devices(1)
    first = ours(training, devices)
    first(training.log_every)
    own_graphs = xla_device.graph_counts().compiled
    loops = {
        "ours": first,
        "naive": ordinary(training, devices.torch, torch_xla.sync),
        "eager": ordinary(training, torch.device("cpu"), lambda: None),
    }
    for loop in loops.values():
        loop(training.log_every)  # compiles; not measured
    warm = xla_device.graph_counts()
    rates: dict[str, list[float]] = {name: [] for name in loops}
    host: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            began = time.perf_counter()
            host[name].append(loop(steps) / steps * 1000)
            rates[name].append(steps / (time.perf_counter() - began))
    counts = xla_device.graph_counts()
    print(
        json.dumps(
            {
                "steps_per_s": {name: round(statistics.median(found), 2) for name, found in rates.items()},
                "host_ms": {name: round(statistics.median(host[name]), 2) for name in ("ours", "naive")},
                "each": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
                "graphs_of_ours": own_graphs,
                "graphs_of_all": warm.compiled,
                "recompiled": counts.compiled - warm.compiled,
                "fallbacks": counts.fallbacks,
            }
        )
    )


if __name__ == "__main__":
    main()
