"""What a model is worth: numbers beside the baselines that tell whether it learned, and how near the optimum.

Pure functions of a model and its settings; `tpu.train.evaluate` reads the checkpoint and prints them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu.train.baselines import dmmse_predictions, ridge_predictions
from tpu.train.bytelm import VOCABULARY, ByteLmWorkload, next_byte_losses
from tpu.train.icl import IclWorkload, Regressions, draw_regressions, predict
from tpu.train.settings import Icl
from tpu.train.transformer import Transformer

SEQUENCES = 4096  # of each kind of task; the standard error of a distance is then about 1 %
HELD_OUT_WINDOWS = 2048  # at most, evenly over the held-out text
_EVALUATION = 2**31  # training folds in steps below 2^31; evaluation draws from beyond
_CHUNK_NUMBERS = 2**23  # floats that a part of an evaluation may hold at a time: 32 MB


def evaluate_icl(workload: IclWorkload, model: Transformer, sequences: int = SEQUENCES) -> dict[str, Any]:
    """Square errors against the noiseless labels and distances to the baselines, mean over the K examples.

    All are divided by D, so that predicting zero has an error of 1. `pretraining` (only with a finite number
    of tasks) draws from the tasks that were trained on, `new` draws new Gaussian ones.
    """
    settings, data = workload.settings, workload.load_data()
    tasks = data.get("tasks")
    random = np.random.Generator(np.random.Philox(key=[workload.seed, _EVALUATION]))
    result: dict[str, Any] = {"workload": "icl", "sequences": sequences}
    if tasks is not None:
        known = tasks[random.integers(len(tasks), size=sequences)]
        result["pretraining"] = _mean_figures(settings, model, known, tasks, workload.seed)
    new = random.standard_normal((sequences, settings.dimensions), np.float32)
    result["new"] = _mean_figures(settings, model, new, tasks, workload.seed)
    return result


def icl_figures(
    settings: Icl, model: Transformer | None, batch: Regressions, tasks: jax.Array | np.ndarray | None
) -> dict[str, jax.Array]:
    """Mean square error by D of each predictor on a batch, and between predictors (`delta_…`)."""
    predictions = {
        "zero": jnp.zeros_like(batch.y),
        "ridge": ridge_predictions(batch.x, batch.y, settings.noise_variance),
    }
    if tasks is not None:
        predictions["dmmse"] = dmmse_predictions(
            batch.x, batch.y, jnp.asarray(tasks), settings.noise_variance
        )
    if model is not None:
        predictions["model"] = predict(model, batch)

    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.square(a - b).mean() / settings.dimensions

    figures = {f"{name}_error": distance(made, batch.clean) for name, made in predictions.items()}
    for optimum in ("dmmse", "ridge"):
        if model is not None and optimum in predictions:
            figures[f"delta_{optimum}"] = distance(predictions["model"], predictions[optimum])
    if tasks is not None:
        figures["dmmse_to_ridge"] = distance(predictions["dmmse"], predictions["ridge"])
    if model is not None:
        figures["model_loss"] = jnp.square(predictions["model"] - batch.y).mean()  # as logged in training
    return figures


def icl_baselines(settings: Icl, tasks: np.ndarray, seed: int, sequences: int) -> dict[str, dict[str, float]]:
    """The baselines alone, as `evaluate_icl` gives them, on the tasks trained on and on new ones."""
    random = np.random.Generator(np.random.Philox(key=[seed, _EVALUATION]))
    known = tasks[random.integers(len(tasks), size=sequences)]
    new = random.standard_normal((sequences, settings.dimensions), np.float32)
    return {
        "pretraining": _mean_figures(settings, None, known, tasks, seed),
        "new": _mean_figures(settings, None, new, tasks, seed),
    }


def _mean_figures(
    settings: Icl, model: Transformer | None, drawn: np.ndarray, tasks: np.ndarray | None, seed: int
) -> dict[str, float]:
    """Figures of a sequence of each drawn task, in parts that fit into memory, each a power of 2 in size."""
    each = settings.examples * ((0 if tasks is None else len(tasks)) + 64)
    fits = max(_CHUNK_NUMBERS // each, 1)
    chunk = 2 ** int(math.log2(min(fits, 512, len(drawn))))
    parts = [
        jax.device_get(
            _chunk_figures(settings, model, drawn[start : start + chunk], tasks, np.uint32(seed), i)
        )
        for i, start in enumerate(range(0, len(drawn) - chunk + 1, chunk))
    ]
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


@partial(jax.jit, static_argnums=0)
def _chunk_figures(
    settings: Icl,
    model: Transformer | None,
    drawn: jax.Array,
    tasks: jax.Array | None,
    seed: jax.Array,
    part: int | jax.Array,
) -> dict[str, jax.Array]:
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(_EVALUATION) + jnp.uint32(part))
    # A TPU would round the factors of matrix products to bfloat16, and the baselines with them.
    with jax.default_matmul_precision("highest"):
        return icl_figures(settings, model, draw_regressions(settings, drawn, key), tasks)


def evaluate_bytelm(
    workload: ByteLmWorkload, model: Transformer, windows: int = HELD_OUT_WINDOWS
) -> dict[str, Any]:
    """Bits per byte on held-out text, beside what knowing the byte frequencies of the training text gives.

    Windows do not overlap; every byte after the first of a window is predicted from those before it in it.
    """
    training, held_out = workload.load_split()
    size = workload.settings.context + 1
    count = min(len(held_out) // size, windows)
    starts = np.linspace(0, len(held_out) - size, count).astype(np.int64)
    text = held_out[starts[:, None] + np.arange(size)]
    losses = jax.jit(next_byte_losses)
    parts = [np.asarray(losses(model, part)) for part in np.array_split(text, math.ceil(count / 128))]
    predicted = text[:, 1:]
    counts = np.bincount(training, minlength=VOCABULARY) + 1.0  # one more each: no byte is impossible
    frequencies = np.log2(counts / counts.sum())
    return {
        "workload": "bytelm",
        "bytes": int(predicted.size),
        "bits_per_byte": float(np.concatenate(parts).mean(dtype=np.float64) / math.log(2)),
        "byte_frequency_bits_per_byte": float(-frequencies[predicted].mean()),
        "uniform_bits_per_byte": 8.0,
    }
