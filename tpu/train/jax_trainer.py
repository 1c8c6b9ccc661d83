"""The built-in JAX trainer: `python -m tpu.train.jax_trainer`, one process a host, started by a run.

Everything it is told comes by the segment contract. The order below is that of a fast start after a
preemption: the newest checkpoint and the compiled programs are fetched beside the imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpu.runtime import segment
from tpu.train.compile_cache import FETCH_DEADLINE_S, PUBLISH_DEADLINE_S, Background, CompileCache, open_cache
from tpu.train.compile_cache import cache_key as make_cache_key
from tpu.train.fingerprint import compile_facts, training_facts
from tpu.train.profile import REQUEST, Profiler

if TYPE_CHECKING:
    from tpu.train.settings import Training
    from tpu.train.step import CallResult, Program


def main() -> None:
    """Train from where the run is to its last step, or until a preemption notice.

    Raises ValidationError for wrong settings, DataChangedError, DivergedError, and what the contract raises.
    """
    plan = segment.Plan.from_environment()
    noticed = _agreed_notice() if plan.num_processes > 1 else None
    with segment.start(noticed=noticed, environment=training_facts, plan=plan) as seg:
        cache = _cache_of(seg)
        fetching = Background("fetching compiled programs", cache.fetch)
        _meet(seg)
        _train(seg, cache, fetching)


def _train(seg: segment.Segment, cache: CompileCache, fetching: Background) -> None:
    # Here and not above: these import JAX, and the contract begins to fetch before that.
    from tpu.train.compile_cache import every_process_writes, use_cache
    from tpu.train.mesh import place, replicated, slice_mesh, state_shardings
    from tpu.train.step import initial_state, lower_program
    from tpu.train.workloads import Configuration, make_workload

    configuration = Configuration.from_values(seg.config)
    training = configuration.training
    workload = make_workload(configuration)
    data, state, mesh = workload.load_data(), initial_state(workload), slice_mesh()
    with seg.phase("compile"):
        fetching.wait(FETCH_DEADLINE_S)
        use_cache(cache)
        lowered = lower_program(training, workload, mesh, state, data)
        with every_process_writes():
            program = lowered.compile()
    publishing = Background("keeping compiled programs", cache.publish)

    shardings = state_shardings(mesh, state, training.shard_parameters)
    state, data = place(seg.restore(state), shardings), place(data, replicated(mesh))
    _say(f"at step {seg.step} of {seg.last_step}, on {mesh.size} device(s) of {seg.num_processes} host(s)")
    _follow(seg, training, program, state, data)
    publishing.wait(PUBLISH_DEADLINE_S)
    cache.close()


def _follow(seg: segment.Segment, training: Training, program: Program, state: Any, data: Any) -> None:
    """Train from the step that the state stands for to the last one."""
    from tpu.train.step import call_arguments

    profiler = _profiler(seg)
    before: CallResult | None = None
    for step, count in seg.calls(training.steps_per_call):
        profiler.before_call(step)
        state, result = program(state, data, *call_arguments(training.seed, step, count))
        _log(seg, training, step, count, result)
        profiler.after_call(step + count, result)
        if before is not None:
            # At most one call ahead of the devices: a notice is then seen within a call's time.
            before.loss.block_until_ready()
        before = result
        seg.checkpoint(step + count, state)


def _log(seg: segment.Segment, training: Training, step: int, count: int, result: CallResult) -> None:
    """Log the log steps of a call; waits for the devices only if it has one."""
    import numpy as np

    from tpu.train.step import logged_steps

    due = logged_steps(training, step, count, seg.last_step)
    if not due:
        return

    losses, norms = np.asarray(result.loss), np.asarray(result.gradient_norm)
    for s in due:
        seg.log(s, loss=losses[s - step - 1], gradient_norm=norms[s - step - 1])


def _profiler(seg: segment.Segment) -> Profiler:
    events = seg.plan.events_path
    request = None if events is None else events.parent / REQUEST
    return Profiler(request, f"{seg.run_dir}/profiles/{seg.attempt}", seg.process_id)


def _cache_of(seg: segment.Segment) -> CompileCache:
    """The compile cache for programs of these settings, chips and libraries; seeds and text make no difference."""
    values = {name: value for name, value in seg.config.items() if name not in ("seed", "data_sha256")}
    key = make_cache_key([values, dict(compile_facts(seg.num_processes))])
    bucket, _, run = seg.run_dir.partition("/runs/")
    owner = f"{run.replace('/', '-')}-{seg.process_id}"
    return open_cache(seg.compile_cache_dir, key, owner, bucket)


def _meet(seg: segment.Segment) -> None:
    """Join the processes of the attempt into one JAX program."""
    if seg.num_processes == 1:
        return
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        # There the processes talk by gloo, which greets on stdout once a device; we speak on stderr.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    jax.distributed.initialize(
        coordinator_address=seg.coordinator,
        num_processes=seg.num_processes,
        process_id=seg.process_id,
        # JAX would listen on every interface of the host.
        coordinator_bind_address=seg.coordinator if seg.process_id == 0 else None,
        initialization_timeout=120,
        shutdown_timeout_seconds=60,
    )
    _say(f"{seg.num_processes} hosts met at {seg.coordinator}")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _agreed_notice() -> Callable[[int], bool]:
    """Asks JAX whether all processes stop here: at the same border, soon after one of them got SIGTERM.

    JAX counts the questions, not the steps: it wants numbers that rise by one.
    """
    asked = 0

    def noticed(step: int) -> bool:
        nonlocal asked
        from jax.experimental import multihost_utils

        asked += 1
        return multihost_utils.reached_preemption_sync_point(asked)

    return noticed


if __name__ == "__main__":
    main()
