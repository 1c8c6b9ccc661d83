"""The training steps of a pack as one compiled program: the step of one run under vmap, a lane a run.

A lane is told apart from the others by numbers alone (`Numbers`), and counts its own steps: lanes may begin and end at
different ones. One that does no step in an iteration keeps its state, so nothing that happens to a run, an end
before its time included, changes a bit of its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu.train import optimizer
from tpu.train.settings import Training
from tpu.train.step import CallResult, State, Workload, updated

LANES = "lanes"


class Numbers(NamedTuple):
    """What tells the lanes apart, an entry each; `clip_norm` is None if none of them clips."""

    seed: Any
    rate: optimizer.Rate
    weight_decay: Any
    clip_norm: Any | None


class PackData(NamedTuple):
    """Data by name: what all lanes share, and what each has of its own, stacked along the first axis."""

    shared: Any
    own: Any


def lane_mesh() -> Mesh:
    """All devices of this process, each with a part of the lanes; a v2 or v3 chip is two of them."""
    return jax.make_mesh((jax.device_count(),), (LANES,), axis_types=(AxisType.Auto,))


def lane_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays with the lanes along their first axis."""
    return NamedSharding(mesh, PartitionSpec(LANES))


def numbers_of(trainings: Sequence[Training]) -> Numbers:
    """The numbers of each lane's training."""
    optimizers = [one.optimizer for one in trainings]
    rates = [optimizer.rate_of(one.optimizer, one.schedule_steps) for one in trainings]
    clip_norms = [one.clip_norm for one in optimizers]
    return Numbers(
        seed=np.array([one.seed for one in trainings], np.uint32),
        rate=optimizer.Rate(
            peak=np.array([one.peak for one in rates], np.float32),
            warm_up=np.array([one.warm_up for one in rates], np.float32),
            length=np.array([one.length for one in rates], np.int32),
        ),
        weight_decay=np.array([one.weight_decay for one in optimizers], np.float32),
        clip_norm=None if None in clip_norms else np.array(clip_norms, np.float32),
    )


def data_of(workloads: Sequence[Workload]) -> PackData:
    """The data of all lanes; tasks of `icl` are padded to the longest list. Raises as the workloads' `load_data`."""
    first = workloads[0].load_data()
    if "tasks" not in first:
        return PackData(first, {})
    lists = [workload.load_data()["tasks"] for workload in workloads]
    most = max(map(len, lists))
    padded = [np.pad(tasks, ((0, most - len(tasks)), (0, 0))) for tasks in lists]
    return PackData({}, {"tasks": np.stack(padded), "count": np.array([*map(len, lists)], np.int32)})


def stacked(states: Sequence[State]) -> State:
    """The states of all lanes as one."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def on_host(state: State) -> State:
    """A copy in host memory, which the next call does not change."""
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)


def lane_of(state: State, lane: int) -> State:
    """The state of one lane, out of that of all on the host."""
    return jax.tree.map(lambda leaf: leaf[lane], state)


def lower_pack(
    training: Training, workload: Workload, mesh: Mesh, state: State, data: PackData, numbers: Numbers
) -> jax.stages.Lowered:
    """The program for lanes like this one, traced; `.compile()` gives a `Program` that is called with
    (state, data, numbers, steps done of each lane, steps to do of each).

    Results have shape (steps_per_call, lanes), with 0 where a lane did nothing. Raises ValueError if the lanes cannot
    be dealt out to the devices.
    """
    lanes = len(numbers.seed)
    if lanes % mesh.size:
        raise ValueError(f"{lanes} lanes cannot be dealt out evenly to {mesh.size} devices")

    def lane_step(state: State, own: Any, shared: Any, numbers: Numbers, step: jax.Array, active: jax.Array):
        key = jax.random.fold_in(jax.random.key(numbers.seed), step)
        batch = workload.batch({**shared, **own}, key)
        loss, gradients = jax.value_and_grad(workload.loss)(state["params"], batch)
        update = optimizer.direction(numbers.clip_norm, numbers.weight_decay)
        rate = optimizer.learning_rate(training.optimizer.schedule, numbers.rate, step)
        after = updated(state, gradients, update, rate)
        result = CallResult(loss, optax.global_norm(gradients))
        return jax.tree.map(lambda new, old: jnp.where(active, new, old), (after, result), (state, nothing))

    nothing = CallResult(*(jnp.zeros(()) for _ in CallResult._fields))
    every_lane = jax.vmap(lane_step, in_axes=(0, 0, None, 0, 0, 0))

    def call(state: State, data: PackData, numbers: Numbers, first: jax.Array, count: jax.Array):
        empty = CallResult(*(jnp.zeros((training.steps_per_call, len(first))) for _ in CallResult._fields))

        def body(i: jax.Array, carry: tuple[State, CallResult]) -> tuple[State, CallResult]:
            state, results = carry
            state, result = every_lane(state, data.own, data.shared, numbers, first + i, i < count)
            return state, CallResult(*(all.at[i].set(one) for all, one in zip(results, result, strict=True)))

        return jax.lax.fori_loop(0, count.max(), body, (state, empty))

    of_lanes, everywhere = PartitionSpec(LANES), PartitionSpec()
    # Each device goes through its lanes by itself: nothing is sent, and a lane's bits come from one device.
    dealt_out = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(of_lanes, PackData(everywhere, of_lanes), of_lanes, of_lanes, of_lanes),
        out_specs=(of_lanes, PartitionSpec(None, LANES)),
        check_vma=False,
    )
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype),
        (state, data, numbers, *call_arguments([0] * lanes, [0] * lanes)),
    )
    return jax.jit(dealt_out, donate_argnums=0).lower(*shapes)


def call_arguments(first: Sequence[int], count: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of a call by lane: `count` steps after `first` are done."""
    return np.array(first, np.int32), np.array(count, np.int32)
