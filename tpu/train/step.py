"""The training step as one compiled program that does several steps a call.

The number of steps of a call is an argument of the program, not a part of it: a call of 10 steps, a
shorter one before a planned checkpoint, and a single step run the very same machine code. One program is
compiled at start, and call lengths cannot change bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from tpu.train import optimizer
from tpu.train.mesh import AXIS, batch_sharding, check_batch, replicated, state_shardings
from tpu.train.settings import Training

# {"params": model, "optimizer": its state}: these names are the arrays' names in a checkpoint.
State = dict[str, Any]


class Workload(Protocol):
    """A model, its data and its loss; all randomness comes in by a key."""

    def draw_model(self) -> Any: ...
    def load_data(self) -> dict[str, np.ndarray]: ...
    def batch(self, data: dict[str, jax.Array], key: jax.Array) -> Any: ...
    def loss(self, model: Any, batch: Any) -> jax.Array: ...


class CallResult(NamedTuple):
    """Of each step of a call; entries beyond the call's count are 0."""

    loss: jax.Array
    gradient_norm: jax.Array


# (state, data, seed, steps done, count) -> (state, results); the state that goes in is used up.
Program = Callable[..., tuple[State, CallResult]]


def initial_state(workload: Workload) -> State:
    """The state before the first step, with NumPy leaves."""
    model = workload.draw_model()
    return {"params": model, "optimizer": optimizer.initial_state(model)}


def updated(state: State, gradients: Any, update: optax.GradientTransformation, rate: jax.Array) -> State:
    """The state after one update at a learning rate."""
    steps, moments = update.update(gradients, state["optimizer"], state["params"])
    parameters = jax.tree.map(lambda p, s: p - rate * s, state["params"], steps)
    return {"params": parameters, "optimizer": moments}


def lower_program(
    training: Training, workload: Workload, mesh: Mesh, state: Any, data: Any
) -> jax.stages.Lowered:
    """The program, traced for a state and data of these shapes on this mesh; `.compile()` gives a `Program`.

    Raises ValueError if the batch cannot be dealt out to the devices.
    """
    check_batch(mesh, training.workload.batch)
    on_all = replicated(mesh)
    where = state_shardings(mesh, state, training.shard_parameters)
    in_parts = batch_sharding(mesh)
    loss_and_gradients = _loss_and_gradients(training, workload, mesh, where["params"])
    update = optimizer.direction(training.optimizer.clip_norm, training.optimizer.weight_decay or None)
    rate = optimizer.rate_of(training.optimizer, training.schedule_steps)

    def train_step(state: State, data: Any, seed: jax.Array, step: jax.Array) -> tuple[State, CallResult]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        batch = jax.lax.with_sharding_constraint(workload.batch(data, key), in_parts)
        loss, gradients = loss_and_gradients(state["params"], batch)
        now = optimizer.learning_rate(training.optimizer.schedule, rate, step)
        return updated(state, gradients, update, now), CallResult(loss, optax.global_norm(gradients))

    def train_call(state: State, data: Any, seed: jax.Array, first: jax.Array, count: jax.Array):
        empty = CallResult(*(jnp.zeros(training.steps_per_call) for _ in CallResult._fields))

        def body(i: jax.Array, carry: tuple[State, CallResult]) -> tuple[State, CallResult]:
            state, results = carry
            state, result = train_step(state, data, seed, first + i)
            return state, CallResult(*(all.at[i].set(one) for all, one in zip(results, result, strict=True)))

        return jax.lax.fori_loop(0, count, body, (state, empty))

    program = jax.jit(
        train_call,
        donate_argnums=0,
        in_shardings=(where, jax.tree.map(lambda _: on_all, data), on_all, on_all, on_all),
        out_shardings=(where, on_all),
    )
    # Shapes and not the arrays themselves: of several processes none has a whole sharded one.
    state, data = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), (state, data))
    return program.lower(state, data, *call_arguments(0, 0, 1))


def _loss_and_gradients(training: Training, workload: Workload, mesh: Mesh, where: Any) -> Callable[..., Any]:
    """(parameters, batch in parts) -> (loss, gradients), means over the whole batch."""
    on_part = jax.value_and_grad(workload.loss)
    if training.shard_parameters:

        def gathered(parameters: Any, batch: Any) -> tuple[jax.Array, Any]:
            loss, gradients = on_part(parameters, batch)
            return loss, jax.lax.with_sharding_constraint(gradients, where)

        return gathered

    def summed(parameters: Any, part: Any) -> tuple[jax.Array, Any]:
        # One vector, hence one message: hosts without a TPU's links sum array by array, some 5 ms each.
        vector, unravel = ravel_pytree(on_part(parameters, part))
        return unravel(jax.lax.psum(vector, AXIS) / mesh.size)

    everywhere, in_parts = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(everywhere, in_parts),
        out_specs=everywhere,
        check_vma=False,  # it would sum each gradient by itself
    )


def call_arguments(seed: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scalar arguments of a call: `count` steps after `first` are done."""
    return np.uint32(seed), np.int32(first), np.int32(count)  # type: ignore[return-value]


def logged_steps(training: Training, step: int, count: int, last_step: int) -> list[int]:
    """The log steps of a call that does `count` steps after `step`, and the last one of all.

    The loss of step s is that of the batch of update s, before it. Which steps are logged does not depend on where
    calls, segments or attempts begin.
    """
    return [s for s in range(step + 1, step + count + 1) if s % training.log_every == 0 or s == last_step]
