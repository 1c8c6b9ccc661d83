"""The built-in PyTorch/XLA trainer: `python -m tpu.train.xla_trainer`, one process a host, started by a run.

Everything it is told comes by the segment contract, as with the JAX trainer, whose checkpoints, initial
parameters and arithmetic it shares. A step is one compiled graph; numbers leave the devices at log steps and
for checkpoints alone.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu.runtime import segment
from tpu.runtime.fingerprint import fingerprint
from tpu.train import xla_device
from tpu.train.compile_cache import PUBLISH_DEADLINE_S, Background, CompileCache, cache_key, open_cache
from tpu.train.profile import REQUEST, Profiler, Tracer
from tpu.train.randomness import step_seeds
from tpu.train.step_guard import StepGuard

if TYPE_CHECKING:
    from torch import Tensor

    from tpu.train.settings import Training


def main() -> None:
    """Train from where the run is to its last step, or until a preemption notice.

    Raises ValidationError for wrong settings, DataChangedError, DivergedError, UnsupportedByRuntime, and what the
    contract raises.
    """
    plan = segment.Plan.from_environment()
    causes = xla_device.prepare(plan.events_path.parent if plan.events_path else Path(tempfile.mkdtemp()))
    facts: dict[str, str] = {}
    with segment.start(environment=lambda: facts, plan=plan) as seg:
        devices = xla_device.open_devices(seg.num_processes)
        facts |= training_facts(devices)
        cache = _use_cache(seg, devices)
        _train(seg, devices, causes, cache)
        if cache is not None:
            Background("keeping compiled programs", cache.publish).wait(PUBLISH_DEADLINE_S)
            cache.close()


def _train(
    seg: segment.Segment, devices: xla_device.Devices, causes: Path, cache: CompileCache | None
) -> None:
    from tpu.train.torch_workloads import make_model, make_torch_workload
    from tpu.train.xla_step import initial_arrays, place_state, step_program

    training, data_sha256 = _settings(seg.config)
    workload = make_torch_workload(training, data_sha256)
    model, data = make_model(training, workload), devices.place(workload.load_data())
    guard = StepGuard(seg, causes)
    arrays = initial_arrays(model)
    with seg.phase("compile"):
        state = place_state(devices, training, arrays)
        program = step_program(training, workload, model, devices, state, data)
    if cache is not None:
        Background("keeping compiled programs", cache.publish)

    _seed(devices, training.seed, 0)
    restored = seg.restore(_checkpoint(0, arrays, devices))
    _set_generators(restored)
    state = place_state(devices, training, {name: restored[name] for name in arrays})
    print(
        f"step {seg.step} of {seg.last_step}, {devices.count} devices in {seg.num_processes} processes",
        flush=True,
    )
    profiler = _profiler(seg, devices)
    for step, count in seg.calls(training.steps_per_call):
        profiler.before_call(step)
        results = []
        for at in range(step, step + count):
            _seed(devices, training.seed, at)
            *values, loss, norm = program([*state.values(), *data.values()])
            state = dict(zip(state, values, strict=True))
            results.append((loss, norm))
        _log(seg, training, step, results)
        # No further ahead of the devices than a call: a notice is then seen within a call's time.
        devices.wait()
        profiler.after_call(step + count, None)
        guard.after(step + count)
        seg.checkpoint(step + count, _checkpoint(step + count, state, devices))


def training_facts(devices: xla_device.Devices) -> dict[str, str]:
    """What the bits depend on besides what the contract records for every program."""
    return {
        "python": platform.python_version(),
        "devices": f"{devices.count} {devices.kind}",
        "processes x devices": f"{devices.processes} x {devices.count // devices.processes}",
        "xla generator": xla_device.GENERATOR,
        "matmul precision": xla_device.matmul_precision(),
    }


def _settings(config: dict[str, Any]) -> tuple[Training, str | None]:
    from tpu.train.settings import Training

    values = dict(config)
    data_sha256 = values.pop("data_sha256", None)
    return Training.model_validate(values), data_sha256


def _log(seg: segment.Segment, training: Training, step: int, results: list[tuple[Tensor, Tensor]]) -> None:
    """Log the log steps of a call; only these values leave the devices. Steps are counted as the JAX trainer does."""
    for s, (loss, norm) in enumerate(results, step + 1):
        if s % training.log_every == 0 or s == seg.last_step:
            seg.log(s, loss=loss, gradient_norm=norm)


def _seed(devices: xla_device.Devices, seed: int, step: int) -> None:
    """Seed every generator for one step: XLA's, which draws the batch, and for code on the host torch's and NumPy's."""
    import torch

    seeds = step_seeds(seed, step)
    devices.seed(seeds.xla)
    torch.default_generator.manual_seed(seeds.torch)
    np.random.seed(seeds.numpy)


def _checkpoint(step: int, arrays: Mapping[str, Any], devices: xla_device.Devices) -> dict[str, Any]:
    """What a checkpoint holds, by name: the state under the names of the JAX trainer, the step on which the learning
    rate depends, and the generators' states."""
    import torch

    numpy_state: Any = np.random.get_state(legacy=False)["state"]
    return {
        **arrays,
        "scheduler/step": np.int32(step),
        "random/xla": np.uint64(devices.random_state()),
        "random/torch": torch.get_rng_state(),
        "random/numpy/keys": numpy_state["key"],
        "random/numpy/position": np.int32(numpy_state["pos"]),
    }


def _set_generators(restored: Mapping[str, Any]) -> None:
    """As they were when the checkpoint was taken. Each step seeds them anew, so this is for what runs between."""
    import torch

    torch.set_rng_state(restored["random/torch"])
    np.random.set_state(
        ("MT19937", restored["random/numpy/keys"], int(restored["random/numpy/position"]), 0, 0.0)
    )


def _profiler(seg: segment.Segment, devices: xla_device.Devices) -> Profiler:
    events = seg.plan.events_path
    request = None if events is None else events.parent / REQUEST
    tracer = Tracer(xla_device.start_trace, xla_device.stop_trace, lambda _: devices.wait())
    return Profiler(request, f"{seg.run_dir}/profiles/{seg.attempt}", seg.process_id, tracer)


def _use_cache(seg: segment.Segment, devices: xla_device.Devices) -> CompileCache | None:
    """Compiled graphs of earlier attempts, from this host or the bucket; None where torch_xla cannot keep any.

    It wants the folder before the first graph, so unlike JAX's the entries are fetched before all else.
    """
    if not xla_device.keeps_graphs():
        return None
    values = {name: value for name, value in seg.config.items() if name not in ("seed", "data_sha256")}
    key = cache_key([values, dict(fingerprint(seg.num_processes, {}, training_facts(devices)))])
    bucket, _, run = seg.run_dir.partition("/runs/")
    owner = f"{run.replace('/', '-')}-{seg.process_id}"
    cache = open_cache(seg.compile_cache_dir, key, owner, bucket, kind="xla")
    cache.fetch()
    xla_device.use_cache(cache.working)
    return cache


if __name__ == "__main__":
    main()
