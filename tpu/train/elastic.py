"""The built-in workloads cut into work units, for members of a run over several slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu.elastic import part
from tpu.train import optimizer
from tpu.train.fingerprint import training_facts
from tpu.train.jax_units import JaxProgram, update_with
from tpu.train.settings import Training
from tpu.train.step import Workload, initial_state, updated


def train(
    loss: Callable[[Any, Any], jax.Array],
    unit_batch: Callable[[int, int], Any],
    transformation: optax.GradientTransformation,
    params: Any,
) -> Any:
    """The whole program of a command with `mode: elastic`: train to the run's last step, whatever slices come and go.

    `loss(params, batch)` is the mean over a unit's batch, `unit_batch(step, unit)` gives that batch: both are functions
    of their arguments alone. `transformation` is the optimizer, such as optax.adam(1e-3). Returns the final state,
    {"params": …, "optimizer": …}.
    """
    with part.start() as own:
        program = JaxProgram(
            loss,
            unit_batch,
            update_with(transformation),
            params,
            transformation.init(params),
            own.units,
            own.unit_devices,
        )
        return own.train(program, training_facts)


def unit_program(training: Training, workload: Workload, units: int, devices: int = 1) -> JaxProgram:
    """The training of `tpu.train.step`, its batch cut into `units` equal parts, each computed on `devices` devices.

    Raises ValueError if the batch cannot be cut so.
    """
    batch = training.workload.batch
    if batch % (units * devices):
        raise ValueError(
            f"a batch of {batch} cannot be cut into {units} units for {devices} device(s) each: choose a multiple of "
            f"{units * devices}"
        )
    data = jax.device_put(workload.load_data(), jax.local_devices()[0])
    direction = optimizer.direction(training.optimizer.clip_norm, training.optimizer.weight_decay or None)
    rate = optimizer.rate_of(training.optimizer, training.schedule_steps)
    rows = batch // units

    @jax.jit
    def draw(data: Any, step: jax.Array, unit: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(training.seed), step)
        whole = workload.batch(data, key)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, unit * rows, rows), whole)

    def update(params: Any, moments: Any, gradients: Any, step: jax.Array) -> tuple[Any, Any]:
        now = optimizer.learning_rate(training.optimizer.schedule, rate, step)
        state = updated({"params": params, "optimizer": moments}, gradients, direction, now)
        return state["params"], state["optimizer"]

    state = initial_state(workload)
    return JaxProgram(
        workload.loss,
        lambda step, unit: draw(data, np.int32(step), np.int32(unit)),
        update,
        jax.tree.map(jnp.asarray, state["params"]),
        state["optimizer"],
        units,
        devices,
    )
