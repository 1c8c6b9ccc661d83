"""Adam whose learning rate is a function of the step alone, so that a resume cannot shift it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu.train.settings import Optimizer


def learning_rate(settings: Optimizer, schedule_steps: int, step: jax.Array) -> jax.Array:
    """The rate of the update after `step` updates; beyond `schedule_steps` it stays where it ended."""
    if settings.schedule == "constant":
        return jnp.full((), settings.learning_rate, jnp.float32)
    warm_up = settings.warmup_fraction * schedule_steps
    # The first update has a rate above 0: it would else be a step that trains nothing.
    done = jnp.minimum(step + 1, schedule_steps).astype(jnp.float32)
    rising = done / warm_up if warm_up else jnp.ones(())
    progress = jnp.clip((done - warm_up) / max(schedule_steps - warm_up, 1e-6), 0, 1)
    falling = 1 - progress if settings.schedule == "triangle" else (1 + jnp.cos(math.pi * progress)) / 2
    return settings.learning_rate * jnp.minimum(jnp.minimum(rising, 1), falling)


def direction(settings: Optimizer) -> optax.GradientTransformation:
    """Gradients to the direction that is taken times −learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity(),
        optax.scale_by_adam(),
        optax.add_decayed_weights(settings.weight_decay) if settings.weight_decay else optax.identity(),
    )


def initial_state(settings: Optimizer, parameters: Any) -> Any:
    """The optimizer's state with NumPy leaves: zeros of the shapes that optax asks for, compiled nowhere."""
    shapes = jax.eval_shape(direction(settings).init, parameters)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
