"""A GPT-2 style causal transformer: a frozen Equinox module whose leaves are arrays and nothing else.

The initial parameters are drawn with NumPy on the host. A restart then needs no compiled initialisation:
it makes the shapes, restores over them, and compiles one program only, the training step.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tpu.train import settings
from tpu.train.initial import draw_parameters

# NumPy while a model is drawn or restored, JAX while it runs; a leaf is an array either way.
Array = Any


class Linear(eqx.Module):
    """`x @ weight + bias`, weight of shape (inputs, outputs)."""

    weight: Array
    bias: Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + self.bias


class LayerNorm(eqx.Module):
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it."""

    scale: Array
    bias: Array

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-5) * self.scale + self.bias


class Attention(eqx.Module):
    """Causal self-attention."""

    qkv: Linear
    output: Linear
    heads: int = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        *_, length, width = x.shape
        split = self.qkv(x).reshape(*x.shape[:-1], 3, self.heads, width // self.heads)
        query, key, value = (split[..., i, :, :] for i in range(3))
        scores = jnp.einsum("...qhc,...khc->...hqk", query, key) / math.sqrt(width // self.heads)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return self.output(jnp.einsum("...hqk,...khc->...qhc", weights, value).reshape(x.shape))


class Block(eqx.Module):
    """Attention and a two-layer perceptron, each normalised before and added to the stream."""

    norm_attention: LayerNorm
    attention: Attention
    norm_mlp: LayerNorm
    up: Linear
    down: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class Transformer(eqx.Module):
    """Maps (..., length, inputs) vectors, or (..., length) tokens if `tokens`, to (..., length, outputs)."""

    embed: Linear | Array
    positions: Array
    blocks: tuple[Block, ...]
    norm: LayerNorm
    readout: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        stream = self.embed(x) if isinstance(self.embed, Linear) else jnp.take(self.embed, x, axis=0)
        stream = stream + self.positions[: stream.shape[-2]]
        for block in self.blocks:
            stream = block(stream)
        return self.readout(self.norm(stream))


def draw_transformer(
    shape: settings.Transformer, *, inputs: int, outputs: int, length: int, tokens: bool, seed: int
) -> Transformer:
    """A new model with NumPy leaves (float32), a function of its arguments alone.

    `inputs` is the size of the input vectors, or of the vocabulary if `tokens`; `length` the longest sequence.
    Raises ValueError if the width is no multiple of the heads.
    """
    drawn = draw_parameters(shape, inputs=inputs, outputs=outputs, length=length, tokens=tokens, seed=seed)

    def linear(name: str) -> Linear:
        return Linear(drawn[f"{name}/weight"], drawn[f"{name}/bias"])

    def norm(name: str) -> LayerNorm:
        return LayerNorm(drawn[f"{name}/scale"], drawn[f"{name}/bias"])

    def block(name: str) -> Block:
        attention = Attention(
            linear(f"{name}/attention/qkv"), linear(f"{name}/attention/output"), heads=shape.heads
        )
        return Block(
            norm(f"{name}/norm_attention"),
            attention,
            norm(f"{name}/norm_mlp"),
            linear(f"{name}/up"),
            linear(f"{name}/down"),
        )

    return Transformer(
        embed=drawn["embed"] if tokens else linear("embed"),
        positions=drawn["positions"],
        blocks=tuple(block(f"blocks/{i}") for i in range(shape.layers)),
        norm=norm("norm"),
        readout=linear("readout"),
    )
