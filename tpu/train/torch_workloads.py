"""The built-in workloads in PyTorch: batches drawn on the device, and their losses.

Models and losses are those of the JAX trainer (a test holds it). Batches are drawn by another generator, so they
are other numbers of the same distribution.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tpu.train.initial import draw_parameters, pretraining_tasks
from tpu.train.settings import ByteLm, Icl, Training
from tpu.train.text import check_text, read_text, split
from tpu.train.torch_model import Transformer, next_byte_losses, predict_labels

VOCABULARY = 256

Batch = tuple[Tensor, ...]


class TorchWorkload(Protocol):
    """A model, its data and its loss. Tensors are made on the device that is given."""

    def shape(self) -> dict[str, int | bool]: ...
    def load_data(self) -> dict[str, np.ndarray]: ...
    def batch(self, data: dict[str, Tensor], device: torch.device) -> Batch: ...
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...


class TorchIcl:
    """In-context linear regression; see tpu/train/icl.py."""

    def __init__(self, settings: Icl, seed: int) -> None:
        self.settings, self.seed = settings, seed

    def shape(self) -> dict[str, int | bool]:
        s = self.settings
        return {"inputs": s.dimensions + 1, "outputs": 1, "length": 2 * s.examples, "tokens": False}

    def load_data(self) -> dict[str, np.ndarray]:
        """The pretraining tasks (M, D); empty when tasks are Gaussian."""
        s = self.settings
        return {} if s.tasks is None else {"tasks": pretraining_tasks(s.tasks, s.dimensions, self.seed)}

    def batch(self, data: dict[str, Tensor], device: torch.device) -> Batch:
        """(x (B, K, D), noisy labels y (B, K)) by torch's generator of the device."""
        s = self.settings
        if "tasks" in data:
            w = data["tasks"][draw_indices(s.batch, data["tasks"].shape[0], device)]
        else:
            w = torch.randn(s.batch, s.dimensions, device=device)
        x = torch.randn(s.batch, s.examples, s.dimensions, device=device)
        # Products and a sum, not a matrix product: a TPU rounds those to bfloat16, and labels are exact.
        clean = (x * w[:, None, :]).sum(-1)
        noise = torch.randn(s.batch, s.examples, device=device)
        return x, clean + s.noise_variance**0.5 * noise

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean square error against the noisy labels, over all examples of all sequences."""
        x, y = batch
        return (predict_labels(model, x, y) - y).square().mean()


class TorchByteLm:
    """A byte-level language model; see tpu/train/bytelm.py."""

    def __init__(self, settings: ByteLm, data_sha256: str | None) -> None:
        self.settings, self.data_sha256 = settings, data_sha256

    def shape(self) -> dict[str, int | bool]:
        return {"inputs": VOCABULARY, "outputs": VOCABULARY, "length": self.settings.context, "tokens": True}

    def load_data(self) -> dict[str, np.ndarray]:
        """The part of the text that is trained on, as uint8. Raises DataChangedError, TextNotFoundError."""
        text = read_text(self.settings.text)
        check_text(text, self.data_sha256, self.settings.text)
        training, _ = split(text, self.settings)
        return {"text": training}

    def batch(self, data: dict[str, Tensor], device: torch.device) -> Batch:
        """Windows of context + 1 bytes, (B, context + 1), by torch's generator of the device."""
        text, window = data["text"], self.settings.context + 1
        starts = draw_indices(self.settings.batch, text.shape[0] - window + 1, device)
        return (text[starts[:, None] + torch.arange(window, device=device)],)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy of the next byte, in nats."""
        return next_byte_losses(model, batch[0]).mean()


def draw_indices(count: int, below: int, device: torch.device) -> Tensor:
    """`count` whole numbers in [0, below), evenly.

    From two floats: XLA draws floats by its own generator on every device. Each has 23 random bits (of more, the
    last would always be 0), so one alone could not name each place of a text of more than 8 MB.
    """
    bits = (torch.rand(2, count, device=device) * 2**23).long()
    return (bits[0] * 2**23 + bits[1]) % below


def make_torch_workload(training: Training, data_sha256: str | None) -> TorchIcl | TorchByteLm:
    """The workload of a training."""
    if isinstance(training.workload, Icl):
        return TorchIcl(training.workload, training.seed)
    return TorchByteLm(training.workload, data_sha256)


def make_model(training: Training, workload: TorchWorkload) -> Transformer:
    """The model on the CPU with its initial parameters, the numbers of the JAX trainer's."""
    shape, size = training.workload.model, workload.shape()
    model = Transformer(layers=shape.layers, width=shape.width, heads=shape.heads, **size)  # type: ignore[arg-type]
    drawn = draw_parameters(shape, seed=training.seed, **size)  # type: ignore[arg-type]
    model.load_state_dict({name.replace("/", "."): torch.from_numpy(value) for name, value in drawn.items()})
    return model
