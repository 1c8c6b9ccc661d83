"""The transformer of the built-in trainings in plain PyTorch: this file needs torch and nothing else.

It is copied beside exported weights, so keep it free of imports of ours. Parameters have the names and shapes
of the JAX model's: `blocks.0.attention.qkv.weight` here is `params/blocks/0/attention/qkv/weight` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """`x @ weight + bias`, weight of shape (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class LayerNorm(nn.Module):
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) * self.scale + self.bias


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.output = Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = torch.softmax(scores.masked_fill(~causal, -math.inf), dim=-1)
        return self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Maps (batch, length, inputs) vectors, or (batch, length) tokens if `tokens`, to (batch, length, outputs)."""

    def __init__(
        self, *, layers: int, width: int, heads: int, inputs: int, outputs: int, length: int, tokens: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(inputs, width)) if tokens else Linear(inputs, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = LayerNorm(width)
        self.readout = Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embed(x) if isinstance(self.embed, Linear) else self.embed[x]
        stream = stream + self.positions[: stream.shape[-2]]
        for block in self.blocks:
            stream = block(stream)
        return self.readout(self.norm(stream))


def predict_labels(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In-context regression: predictions (B, K) of each y from the examples before it; x (B, K, D), y (B, K)."""
    batch, examples, dimensions = x.shape
    x_tokens = torch.cat([torch.zeros_like(x[..., :1]), x], dim=-1)
    y_tokens = torch.cat([y[..., None], torch.zeros_like(x)], dim=-1)
    tokens = torch.stack([x_tokens, y_tokens], dim=2).reshape(batch, 2 * examples, dimensions + 1)
    return model(tokens)[:, ::2, 0]


def next_byte_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Language model: cross entropies in nats, (B, context), of each byte after the first of each window."""
    windows = windows.long()
    logits = torch.log_softmax(model(windows[:, :-1]), dim=-1)
    return -logits.gather(-1, windows[:, 1:, None])[..., 0]


def load_exported(folder: str) -> tuple[Transformer, dict[str, Any]]:
    """The model of an export (`model.safetensors` and `model.json`) and what its JSON file says."""
    import json
    from pathlib import Path

    from safetensors.torch import load_file

    about = json.loads((Path(folder) / "model.json").read_text())
    model = Transformer(**about["transformer"])
    weights: Mapping[str, Tensor] = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict(dict(weights))
    return model.eval(), about
