"""Adam whose learning rate is a function of the step alone, so that a resume cannot shift it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu.train.settings import Optimizer, Schedule


class Rate(NamedTuple):
    """What a learning rate depends on besides its schedule's shape and the step; plain numbers, or traced ones."""

    peak: Any
    warm_up: Any  # steps
    length: Any  # steps


def rate_of(settings: Optimizer, schedule_steps: int) -> Rate:
    """The numbers of a training's learning rate."""
    return Rate(settings.learning_rate, settings.warmup_fraction * schedule_steps, schedule_steps)


def learning_rate(schedule: Schedule, rate: Rate, step: jax.Array) -> jax.Array:
    """The rate of the update after `step` updates; beyond the schedule's length it stays where it ended."""
    if schedule == "constant":
        return jnp.asarray(rate.peak, jnp.float32)
    # The first update has a rate above 0: it would else be a step that trains nothing.
    done = jnp.minimum(step + 1, rate.length).astype(jnp.float32)
    rising = done / jnp.maximum(rate.warm_up, 1e-6)
    progress = jnp.clip((done - rate.warm_up) / jnp.maximum(rate.length - rate.warm_up, 1e-6), 0, 1)
    falling = 1 - progress if schedule == "triangle" else (1 + jnp.cos(math.pi * progress)) / 2
    return rate.peak * jnp.minimum(jnp.minimum(rising, 1), falling)


def direction(clip_norm: Any | None, weight_decay: Any | None) -> optax.GradientTransformation:
    """Gradients to the direction that is taken times −learning rate; the state is of one form whatever is left out."""
    return optax.chain(
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(),
        optax.identity() if weight_decay is None else optax.add_decayed_weights(weight_decay),
    )


def initial_state(parameters: Any) -> Any:
    """The optimizer's state with NumPy leaves: zeros of the shapes that optax asks for, compiled nowhere."""
    shapes = jax.eval_shape(direction(None, None).init, parameters)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
