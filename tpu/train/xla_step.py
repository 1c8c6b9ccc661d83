"""The training step in PyTorch as a function of tensors: what `StepGraph` compiles, and what plain PyTorch runs too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from tpu.train import torch_optimizer
from tpu.train.settings import Training
from tpu.train.torch_model import Transformer
from tpu.train.torch_optimizer import Tensors
from tpu.train.torch_workloads import Batch, TorchWorkload
from tpu.train.xla_device import Devices, StepGraph

# Where each part of the state lies in a checkpoint: the names of the JAX trainer's arrays.
PARAMETERS, COUNT, MU, NU = "params/", "optimizer/1/count", "optimizer/1/mu/", "optimizer/1/nu/"


@dataclass(frozen=True)
class State:
    """Parameters and Adam's state, each by the name of its parameter, such as blocks/0/up/weight."""

    parameters: Tensors
    count: Tensor
    mu: Tensors
    nu: Tensors

    def named(self) -> Tensors:
        """All tensors by their names in a checkpoint, in a fixed order."""
        named = {PARAMETERS + name: tensor for name, tensor in self.parameters.items()}
        named[COUNT] = self.count
        named |= {MU + name: tensor for name, tensor in self.mu.items()}
        return named | {NU + name: tensor for name, tensor in self.nu.items()}

    @classmethod
    def of_named(cls, named: Mapping[str, Tensor]) -> State:
        """The state out of its tensors by name; others are left alone."""

        def below(prefix: str) -> Tensors:
            return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}

        return cls(below(PARAMETERS), named[COUNT], below(MU), below(NU))


def initial_arrays(model: Transformer) -> dict[str, np.ndarray]:
    """The state before the first step, as host arrays by name."""
    drawn = {name.replace(".", "/"): tensor.detach().numpy() for name, tensor in model.named_parameters()}
    arrays = {PARAMETERS + name: array for name, array in drawn.items()}
    arrays[COUNT] = np.zeros((), np.int32)
    for prefix in (MU, NU):
        arrays |= {prefix + name: np.zeros_like(array) for name, array in drawn.items()}
    return arrays


def train_step(
    training: Training, workload: TorchWorkload, model: Transformer, state: State, batch: Batch
) -> tuple[State, Tensor, Tensor]:
    """(state after the update, loss before it, norm of the gradients)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.parameters.items()}
    by_module = {name.replace("/", "."): tensor for name, tensor in leaves.items()}

    def predict(inputs: Tensor) -> Tensor:
        return functional_call(model, by_module, (inputs,))

    with torch.enable_grad():
        loss = workload.loss(predict, batch)  # type: ignore[arg-type]
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    with torch.no_grad():
        norm = torch_optimizer.global_norm(gradients)
        rate = torch_optimizer.learning_rate(training.optimizer, training.schedule_steps, state.count)
        updated = torch_optimizer.adam(
            training.optimizer, rate, norm, gradients, state.parameters, state.count, state.mu, state.nu
        )
    return State(*updated), loss.detach(), norm


def place_state(devices: Devices, training: Training, arrays: Mapping[str, np.ndarray]) -> Tensors:
    """The state on the devices: a copy on each, or in parts (FSDP)."""
    return devices.place(arrays, shard=training.shard_parameters)


def step_program(
    training: Training,
    workload: TorchWorkload,
    model: Transformer,
    devices: Devices,
    state: Tensors,
    data: Tensors,
) -> StepGraph:
    """The whole step as one graph: tensors of the state, then those of the data → the state, loss, norm.

    The state that goes in is used up.

    Raises ValueError if the batch cannot be dealt out to the devices.
    """
    batch = training.workload.batch
    if batch % devices.count:
        raise ValueError(
            f"a batch of {batch} cannot be dealt out evenly to {devices.count} devices: choose a multiple of "
            f"{devices.count}"
        )
    lie = devices.part if training.shard_parameters else devices.replicated
    names, data_names = list(state), list(data)

    def step(tensors: list[Tensor]) -> list[Tensor]:
        before = State.of_named(dict(zip(names, tensors[: len(names)], strict=True)))
        drawn = workload.batch(dict(zip(data_names, tensors[len(names) :], strict=True)), devices.torch)
        after, loss, norm = train_step(
            training, workload, model, before, tuple(devices.batch(part) for part in drawn)
        )
        named = after.named()
        return [*(lie(named[name]) for name in names), devices.replicated(loss), devices.replicated(norm)]

    return StepGraph(devices, step, [*state.values(), *data.values()], used_up=len(names))
