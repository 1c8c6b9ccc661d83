"""A training loop of one's own over several slices: the loss of a unit and the optimizer; the rest is the run's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from tpu.train import elastic

ROWS, WIDTH = 64, 32
WANTED = jax.random.normal(jax.random.key(1), (WIDTH,))


def unit_batch(step: int, unit: int) -> tuple[jax.Array, jax.Array]:
    """A work unit's part of a step's batch: a function of (step, unit) alone."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), unit)
    x = jax.random.normal(key, (ROWS, WIDTH))
    return x, x @ WANTED


def loss(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean over a unit's batch."""
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


if __name__ == "__main__":
    elastic.train(loss, unit_batch, optax.adam(1e-2), {"w": jnp.zeros(WIDTH)})
