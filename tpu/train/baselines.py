"""The two Bayes-optimal predictors of in-context linear regression, and their predictions for every prefix.

For examples (x_1, y_1) … (x_K, y_K) of one task, prediction k uses the k−1 examples before it:
- ridge is optimal when tasks are Gaussian: ŵ_k = (XᵀX + σ²I)⁻¹Xᵀy, and ŵ_1 = 0;
- dMMSE is optimal when tasks are drawn evenly from M known ones: the mean of those, weighted by
  softmax(−Σ_{j<k}(y_j − wᵀx_j)² / 2σ²), and ŵ_1 is the mean of the M tasks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ridge_predictions(x: jax.Array, y: jax.Array, noise_variance: float) -> jax.Array:
    """Ridge's predictions of shape (..., K) for `x` of shape (..., K, D) and `y` of shape (..., K)."""
    dimensions = x.shape[-1]
    outer = x[..., :, None] * x[..., None, :]
    # Sums over the examples *before* each one: the inclusive sum, less the example itself, would lose bits.
    gram = _sum_before(outer, axis=-3)
    moment = _sum_before(x * y[..., None], axis=-2)
    # σ²I makes every system positive definite, the empty prefix included: its solution is 0.
    system = gram + noise_variance * jnp.eye(dimensions, dtype=x.dtype)
    weights = jnp.linalg.solve(system, moment[..., None])[..., 0]
    return jnp.einsum("...kd,...kd->...k", weights, x)


def dmmse_predictions(x: jax.Array, y: jax.Array, tasks: jax.Array, noise_variance: float) -> jax.Array:
    """dMMSE's predictions of shape (..., K) for `x` (..., K, D), `y` (..., K) and `tasks` (M, D).

    Needs memory for (..., K, M) numbers: give it a part of a large batch at a time.
    """
    predictions = jnp.einsum("...kd,md->...km", x, tasks)
    errors = jnp.square(y[..., None] - predictions)
    log_weights = -_sum_before(errors, axis=-2) / (2 * noise_variance)
    # softmax takes the largest away first, so that weights far below e^-88 do not turn into 0/0.
    return jnp.einsum("...km,...km->...k", jax.nn.softmax(log_weights, axis=-1), predictions)


def _sum_before(terms: jax.Array, axis: int) -> jax.Array:
    """Sums over the entries before each one along `axis`: 0 for the first."""
    first = jnp.zeros_like(jax.lax.slice_in_dim(terms, 0, 1, axis=axis))
    shifted = jnp.concatenate([first, jax.lax.slice_in_dim(terms, 0, -1, axis=axis)], axis=axis)
    return jnp.cumsum(shifted, axis=axis)
