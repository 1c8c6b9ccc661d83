"""Initial parameters of a transformer, drawn with NumPy: the same numbers under the same names for every framework.

Names are paths such as `blocks/0/attention/qkv/weight`, those of the arrays in a checkpoint below `params/`.
"""

from __future__ import annotations

import math

import numpy as np

from tpu.train import settings


def draw_parameters(
    shape: settings.Transformer, *, inputs: int, outputs: int, length: int, tokens: bool, seed: int
) -> dict[str, np.ndarray]:
    """New parameters (float32) by name, a function of the arguments alone.

    `inputs` is the size of the input vectors, or of the vocabulary if `tokens`; `length` the longest sequence.
    Raises ValueError if the width is no multiple of the heads.
    """
    width = shape.width
    if width % shape.heads:
        raise ValueError(
            f"a transformer of width {width} cannot have {shape.heads} heads: choose a width that is a multiple"
        )
    random = np.random.Generator(np.random.Philox(key=[seed, 0]))
    drawn: dict[str, np.ndarray] = {}

    def normal(name: str, *sizes: int, std: float) -> None:
        drawn[name] = random.standard_normal(sizes, np.float32) * np.float32(std)

    def linear(name: str, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        normal(f"{name}/weight", fan_in, fan_out, std=gain / math.sqrt(fan_in))
        drawn[f"{name}/bias"] = np.zeros(fan_out, np.float32)

    def norm(name: str) -> None:
        drawn[f"{name}/scale"] = np.ones(width, np.float32)
        drawn[f"{name}/bias"] = np.zeros(width, np.float32)

    # The order of the draws decides the numbers: it stays as it is.
    if tokens:
        normal("embed", inputs, width, std=0.5)
    else:
        linear("embed", inputs, width)
    normal("positions", length, width, std=0.1)
    # Each block adds to the stream twice; scaled so that its variance does not grow with depth (GPT-2).
    residual = 1 / math.sqrt(2 * shape.layers)
    for block in (f"blocks/{i}" for i in range(shape.layers)):
        linear(f"{block}/attention/qkv", width, 3 * width)
        linear(f"{block}/attention/output", width, width, residual)
        linear(f"{block}/up", width, 4 * width)
        linear(f"{block}/down", 4 * width, width, residual)
        norm(f"{block}/norm_attention")
        norm(f"{block}/norm_mlp")
    norm("norm")
    linear("readout", width, outputs, gain=0.5)
    return drawn


def pretraining_tasks(count: int, dimensions: int, seed: int) -> np.ndarray:
    """The M tasks of a seed, (M, D) float32. The first m of M are the tasks of the same seed at M = m."""
    random = np.random.Generator(np.random.Philox(key=[seed, 1]))
    return random.standard_normal((count, dimensions), np.float32)
