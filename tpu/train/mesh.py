"""The devices of a slice as one named axis, "data", and where each array of a training lies on it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def slice_mesh() -> Mesh:
    """All devices of all processes, in the order that suits the slice's links."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """A part of the first axis on each device."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def check_batch(mesh: Mesh, batch: int) -> None:
    """Raises ValueError if a batch cannot be dealt out evenly."""
    if batch % mesh.size:
        raise ValueError(
            f"a batch of {batch} cannot be dealt out evenly to {mesh.size} devices: choose a multiple of {mesh.size}"
        )


def state_shardings(mesh: Mesh, state: Any, shard_parameters: bool) -> Any:
    """A sharding for each array of the state: a copy a device, or (FSDP) a part of each array that divides.

    Depends on shapes alone, so an optimizer's moments lie where their parameters lie.
    """

    def sharding(leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        divisible = [axis for axis, size in enumerate(shape) if size and size % mesh.size == 0]
        if not shard_parameters or not divisible:
            return replicated(mesh)
        longest = max(divisible, key=lambda axis: shape[axis])
        return NamedSharding(
            mesh, PartitionSpec(*[AXIS if a == longest else None for a in range(len(shape))])
        )

    return jax.tree.map(sharding, state)


def place(arrays: Any, shardings: Any) -> Any:
    """Puts host arrays, the same in every process, on the devices, without the processes talking.

    `shardings` is one sharding or a tree of them.
    """
    if isinstance(shardings, NamedSharding):
        sharding = shardings
        shardings = jax.tree.map(lambda _: sharding, arrays)

    def put(array: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, arrays, shardings)
