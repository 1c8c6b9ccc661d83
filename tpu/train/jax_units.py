"""A JAX training for members of a run over several slices: give `loss(params, unit_batch)` and the optimizer.

    program = JaxProgram(loss, unit_batch, update_with(optax.adam(1e-3)), params, opt_state, units=8)
    state = take_part(program, program.initial(), 0, settings, hooks)

A unit is one compiled program, run on a sub-mesh of fixed shape: another one sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu.checkpoint.tree import leaves_of, placed_leaves

AXIS = "unit"

# (params, optimizer state, gradients, step) -> (params, optimizer state); compiled, `step` a traced number.
Update = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


def update_with(optimizer: Any) -> Update:
    """The update of an optax optimizer."""

    def update(params: Any, moments: Any, gradients: Any, step: jax.Array) -> tuple[Any, Any]:
        steps, moments = optimizer.update(gradients, moments, params)
        return jax.tree.map(lambda p, s: p + s, params, steps), moments

    return update


class JaxProgram:
    """`loss(params, batch)` is the mean over a unit's batch; `unit_batch(step, unit)` gives that batch, arrays of one
    shape for all units whose first axis is dealt out to `devices` local devices.

    Parameters are float32. Raises ValueError if there are not so many devices here.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], jax.Array],
        unit_batch: Callable[[int, int], Any],
        update: Update,
        params: Any,
        moments: Any,
        units: int,
        devices: int = 1,
    ) -> None:
        here = jax.local_devices()
        if len(here) < devices:
            raise ValueError(f"a unit is computed on {devices} devices, and this host has {len(here)}")
        mesh = Mesh(np.array(here[:devices]), (AXIS,), axis_types=(AxisType.Auto,))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._in_parts = NamedSharding(mesh, PartitionSpec(AXIS))
        self.units = units
        self._initial = {"params": params, "optimizer": moments}
        self._unit_batch = unit_batch
        flat, unravel = ravel_pytree(params)
        if flat.dtype != jnp.float32:
            raise ValueError(f"parameters are summed over slices as float32, found {flat.dtype}")
        self.size = flat.size + 1

        def gradient(params: Any, batch: Any) -> jax.Array:
            value, gradients = jax.value_and_grad(loss)(params, batch)
            return jnp.append(ravel_pytree(gradients)[0], value)

        def apply(state: Any, mean: jax.Array, step: jax.Array) -> Any:
            params, moments = update(state["params"], state["optimizer"], unravel(mean[:-1]), step)
            return {"params": params, "optimizer": moments}

        # The state that goes in stays: peers that are behind may ask for it.
        self._gradient = jax.jit(gradient, out_shardings=self._everywhere)
        self._apply = jax.jit(apply, out_shardings=self._everywhere)

    def initial(self) -> Any:
        """The state before the first step."""
        return jax.device_put(self._initial, self._everywhere)

    def gradient(self, state: Any, step: int, unit: int) -> np.ndarray:
        batch = jax.device_put(self._unit_batch(step, unit), self._in_parts)
        return np.asarray(self._gradient(state["params"], batch))

    def apply(self, state: Any, step: int, mean: np.ndarray) -> Any:
        # A copy: XLA on a CPU reads a NumPy array where it lies, and `mean` is used again.
        return jax.block_until_ready(self._apply(state, jnp.array(mean, copy=True), np.int32(step)))

    def arrays(self, state: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(leaf) for name, leaf in leaves_of(state).items()}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Any:
        state = placed_leaves(self._initial, lambda name, leaf: arrays.get(name, leaf))
        return jax.device_put(state, self._everywhere)
