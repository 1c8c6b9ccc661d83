"""Export a checkpoint's model for plain PyTorch: `python -m tpu.train.torch_export RUN_DIR STEP FOLDER`.

Writes weights (`model.safetensors`), sizes (`model.json`), the model's code (`model.py`, which needs torch alone) and
inputs with the predictions of the evaluator's own model for them (`check.safetensors`), for `tpu.train.torch_check`.
Checkpoints of both built-in trainers can be exported, on any machine; neither XLA nor torch is needed for it:

    from model import load_exported
    model, about = load_exported("FOLDER")
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checked_run_dir
from tpu.checkpoint.restore import read_commit
from tpu.checkpoint.shards import encode
from tpu.train.evaluate import stored_model
from tpu.train.settings import ByteLm, Icl
from tpu.train.workloads import Configuration

PREFIX = "params/"
SEQUENCES = 512  # of each kind to check with


def export_model(run_dir: str, step: int, folder: Path) -> list[Path]:
    """Write the files of the commit at `step` into `folder`; returns their paths.

    Raises NoSuchCheckpoint, Damaged, ParametersDoNotFit, DataChangedError, or ValueError for a run of a command of its
    own.
    """
    run_dir = checked_run_dir(run_dir)
    configuration = Configuration.from_run_record(files.read(f"{run_dir}/run.json"))
    restored = read_commit(run_dir, commit_at(load_fence(run_dir).commits, step, run_dir))
    weights = {
        name.removeprefix(PREFIX).replace("/", "."): array
        for name, array in restored.arrays.items()
        if name.startswith(PREFIX)
    }
    about = {
        "run": run_dir,
        "step": step,
        "attempt": restored.attempt,
        "workload": configuration.training.workload.model_dump(mode="json"),
        "transformer": transformer_sizes(configuration.training.workload),
    }
    contents = {
        "model.safetensors": encode(weights),
        "model.json": json.dumps(about, indent=1).encode(),
        "model.py": (Path(__file__).parent / "torch_model.py").read_bytes(),
        "check.safetensors": encode(reference(configuration, restored.arrays)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def transformer_sizes(workload: Icl | ByteLm) -> dict[str, int | bool]:
    """The arguments of `tpu.train.torch_model.Transformer` for a workload."""
    from tpu.train.bytelm import VOCABULARY

    shape = workload.model.model_dump()
    if isinstance(workload, Icl):
        length = 2 * workload.examples
        return shape | {"inputs": workload.dimensions + 1, "outputs": 1, "length": length, "tokens": False}
    sizes = {"inputs": VOCABULARY, "outputs": VOCABULARY, "length": workload.context, "tokens": True}
    return shape | sizes


def reference(configuration: Configuration, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs, and what the evaluator's model (JAX, on this machine) makes of them."""
    import jax

    from tpu.train.bytelm import ByteLmWorkload, next_byte_losses
    from tpu.train.icl import draw_regressions, predict

    workload, model = stored_model(configuration, arrays)
    with jax.default_matmul_precision("highest"):
        if isinstance(workload, ByteLmWorkload):
            _, held_out = workload.load_split()
            size = workload.settings.context + 1
            starts = np.linspace(0, len(held_out) - size, SEQUENCES // 4).astype(np.int64)
            windows = held_out[starts[:, None] + np.arange(size)]
            return {"windows": windows, "losses": np.asarray(jax.jit(next_byte_losses)(model, windows))}
        random = np.random.Generator(np.random.Philox(key=[workload.seed, 2**31]))
        tasks = random.standard_normal((SEQUENCES, workload.settings.dimensions), np.float32)
        batch = draw_regressions(workload.settings, jax.numpy.asarray(tasks), jax.random.key(workload.seed))
        predictions = jax.jit(predict)(model, batch)
        made: dict[str, Any] = {**batch._asdict(), "predictions": predictions}
        return {name: np.asarray(array) for name, array in made.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tpu.train.torch_export", description=__doc__)
    parser.add_argument("run_dir", help="the run in the bucket, gs://BUCKET/runs/NAME")
    parser.add_argument("step", type=int, help="step of a committed checkpoint")
    parser.add_argument("folder", type=Path, help="where the files go")
    given = parser.parse_args(arguments)
    for path in export_model(given.run_dir, given.step, given.folder):
        print(path)


if __name__ == "__main__":
    main()
