"""In-context linear regression: sequences of examples of a linear task that the model must infer from them.

A task is w ~ N(0, I) in D dimensions, either one of M fixed pretraining tasks or new each time. A sequence
holds K examples x ~ N(0, I), y = wᵀx + N(0, σ²), as 2K tokens of size D+1: `[0, x]`, then `[y, 0…]`.
The model's prediction of y is read at the x token; the loss is the mean square error over all K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu.train.initial import pretraining_tasks
from tpu.train.settings import Icl
from tpu.train.transformer import Transformer, draw_transformer


class Regressions(NamedTuple):
    """A batch of sequences: `x` (B, K, D), noisy labels `y` (B, K), and `clean` labels wᵀx (B, K)."""

    x: jax.Array
    y: jax.Array
    clean: jax.Array


@dataclass(frozen=True)
class IclWorkload:
    """What the training loop needs to know of in-context regression."""

    settings: Icl
    seed: int

    def draw_model(self) -> Transformer:
        """The initial model, with NumPy leaves."""
        return draw_transformer(
            self.settings.model,
            inputs=self.settings.dimensions + 1,
            outputs=1,
            length=2 * self.settings.examples,
            tokens=False,
            seed=self.seed,
        )

    def load_data(self) -> dict[str, np.ndarray]:
        """The pretraining tasks (M, D); empty when tasks are Gaussian."""
        if self.settings.tasks is None:
            return {}
        return {"tasks": pretraining_tasks(self.settings.tasks, self.settings.dimensions, self.seed)}

    def batch(self, data: dict[str, jax.Array], key: jax.Array) -> Regressions:
        """The batch of one step, a function of the key. Of tasks that are padded `data` says the real `count`."""
        task_key, key = jax.random.split(key)
        settings = self.settings
        w = draw_tasks(data.get("tasks"), task_key, settings.batch, settings.dimensions, data.get("count"))
        return draw_regressions(settings, w, key)

    def loss(self, model: Transformer, batch: Regressions) -> jax.Array:
        """Mean square error against the noisy labels, over all examples of all sequences."""
        return jnp.square(predict(model, batch) - batch.y).mean()


def draw_tasks(
    tasks: jax.Array | None, key: jax.Array, count: int, dimensions: int, among: jax.Array | None = None
) -> jax.Array:
    """`count` tasks (count, D), drawn evenly from the first `among` of `tasks`, all if None; new from N(0, I) if there
    are no `tasks`."""
    if tasks is None:
        return jax.random.normal(key, (count, dimensions))
    end = tasks.shape[0] if among is None else among
    return jnp.take(tasks, jax.random.randint(key, (count,), 0, end), axis=0)


def draw_regressions(settings: Icl, w: jax.Array, key: jax.Array) -> Regressions:
    """A sequence of each task of `w` (B, D)."""
    x_key, noise_key = jax.random.split(key)
    x = jax.random.normal(x_key, (w.shape[0], settings.examples, settings.dimensions))
    # Products and a sum, not a matrix product: a TPU rounds those to bfloat16, and labels are exact.
    clean = (x * w[:, None, :]).sum(-1)
    noise = jax.random.normal(noise_key, clean.shape)
    return Regressions(x, clean + settings.noise_variance**0.5 * noise, clean)


def predict(model: Transformer, batch: Regressions) -> jax.Array:
    """The model's predictions (B, K) of each y from the examples before it."""
    b, k, d = batch.x.shape
    x_tokens = jnp.concatenate([jnp.zeros((b, k, 1)), batch.x], axis=-1)
    y_tokens = jnp.concatenate([batch.y[..., None], jnp.zeros((b, k, d))], axis=-1)
    tokens = jnp.stack([x_tokens, y_tokens], axis=2).reshape(b, 2 * k, d + 1)
    return model(tokens)[:, ::2, 0]
