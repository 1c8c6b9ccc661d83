"""Adam in PyTorch with the arithmetic of the JAX trainer's, and a learning rate that is a function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpu.train.settings import Optimizer

Tensors = dict[str, Tensor]

B1, B2, EPSILON = 0.9, 0.999, 1e-8


def learning_rate(settings: Optimizer, schedule_steps: int, step: Tensor) -> Tensor:
    """The rate of the update after `step` updates (a tensor, so that a new step is no new graph)."""
    if settings.schedule == "constant":
        return torch.full_like(step, settings.learning_rate, dtype=torch.float32)
    warm_up = settings.warmup_fraction * schedule_steps
    done = torch.clamp(step + 1, max=schedule_steps).to(torch.float32)
    rising = done / warm_up if warm_up else torch.ones_like(done)
    progress = torch.clamp((done - warm_up) / max(schedule_steps - warm_up, 1e-6), 0, 1)
    falling = 1 - progress if settings.schedule == "triangle" else (1 + torch.cos(math.pi * progress)) / 2
    return settings.learning_rate * torch.minimum(torch.clamp(rising, max=1), falling)


def global_norm(gradients: Tensors) -> Tensor:
    """Square root of the sum of all squares."""
    return torch.sqrt(torch.stack([g.square().sum() for g in gradients.values()]).sum())


def adam(
    settings: Optimizer,
    rate: Tensor,
    norm: Tensor,
    gradients: Tensors,
    parameters: Tensors,
    count: Tensor,
    mu: Tensors,
    nu: Tensors,
) -> tuple[Tensors, Tensor, Tensors, Tensors]:
    """(parameters, count, mu, nu) after one update; all tensors are new ones."""
    if settings.clip_norm is not None:
        clip, small = settings.clip_norm, norm < settings.clip_norm
        gradients = {n: torch.where(small, g, g / norm * clip) for n, g in gradients.items()}
    mu = {n: (1 - B1) * g + B1 * mu[n] for n, g in gradients.items()}
    nu = {n: (1 - B2) * g.square() + B2 * nu[n] for n, g in gradients.items()}
    count = count + 1
    done = count.to(torch.float32)
    unbias_mu, unbias_nu = 1 - torch.pow(B1, done), 1 - torch.pow(B2, done)
    updated = {}
    for name, parameter in parameters.items():
        step = (mu[name] / unbias_mu) / (torch.sqrt(nu[name] / unbias_nu) + EPSILON)
        if settings.weight_decay:
            step = step + settings.weight_decay * parameter
        updated[name] = parameter - rate * step
    return updated, count, mu, nu
