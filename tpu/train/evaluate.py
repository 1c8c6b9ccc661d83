"""Evaluate one checkpoint of a run on any machine: `python -m tpu.train.evaluate RUN_DIR STEP [--out FILE]`.

Reads the run's configuration and the committed checkpoint from the bucket; prints one JSON object as its
last line. Needs no TPU: a checkpoint is plain arrays in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at, parameters_digest
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checked_run_dir
from tpu.checkpoint.restore import read_commit
from tpu.checkpoint.tree import map_leaves
from tpu.connection import relay_home
from tpu.train.bytelm import ByteLmWorkload
from tpu.train.compile_cache import cache_key, open_cache, use_cache
from tpu.train.evaluation import evaluate_bytelm, evaluate_icl
from tpu.train.fingerprint import compile_facts
from tpu.train.icl import IclWorkload
from tpu.train.transformer import Transformer
from tpu.train.workloads import Configuration, make_workload


class ParametersDoNotFit(ValueError):
    """The checkpoint's parameters are not those of the run's model."""


def evaluate_checkpoint(run_dir: str, step: int, cache_folder: Path | None = None) -> dict[str, Any]:
    """The evaluation of the commit at `step`: `step`, `attempt`, `parameters_sha256`, and the workload's figures.

    Programs compiled for one checkpoint serve the next, by way of `cache_folder` and the bucket.

    Raises NoSuchCheckpoint, Damaged, ParametersDoNotFit, DataChangedError, or ValueError for a run of a
    command of its own.
    """
    run_dir = checked_run_dir(run_dir)
    configuration = Configuration.from_run_record(files.read(f"{run_dir}/run.json"))
    restored = read_commit(run_dir, commit_at(load_fence(run_dir).commits, step, run_dir))
    with _compiling_once(configuration, run_dir, step, cache_folder):
        figures = evaluate_arrays(configuration, restored.arrays)
    digest = parameters_digest(restored.arrays)
    about = {"step": step, "attempt": restored.attempt, "parameters_sha256": digest}
    return {**about, "summary": summary(figures), **figures}


def summary(figures: Mapping[str, Any]) -> str:
    """The figures in a sentence or two: what was learned, and how far from the best that is possible."""
    if figures["workload"] == "bytelm":
        return (
            f"{figures['bits_per_byte']:.3f} bits a byte on held-out text; knowing the byte frequencies gives "
            f"{figures['byte_frequency_bits_per_byte']:.3f}."
        )
    sentences = []
    for where, about in (("pretraining", "the tasks it was trained on"), ("new", "new Gaussian tasks")):
        if (of := figures.get(where)) is None:
            continue
        best = f"ridge {of['ridge_error']:.3f}"
        far = f"{of['delta_ridge']:.3f} from ridge"
        if "dmmse_error" in of:
            best += f", dMMSE {of['dmmse_error']:.3f}"
            far += f" and {of['delta_dmmse']:.3f} from dMMSE"
        sentences.append(
            f"On {about} the square error by D is {of['model_error']:.3f} (zero {of['zero_error']:.3f}, {best}); "
            f"its predictions are {far}."
        )
    return " ".join(sentences)


@contextmanager
def _compiling_once(
    configuration: Configuration, run_dir: str, step: int, folder: Path | None
) -> Iterator[None]:
    if folder is None:
        yield
        return
    bucket, _, run = run_dir.partition("/runs/")
    workload = configuration.training.workload.model_dump(mode="json")
    key = cache_key(["evaluate", workload, dict(compile_facts(1))])
    cache = open_cache(folder, key, f"evaluate-{run}-{step}-{os.getpid()}", bucket)
    cache.fetch()
    use_cache(cache)
    yield
    cache.publish()
    cache.close()


def evaluate_arrays(configuration: Configuration, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The figures for parameters given as the arrays `params/…`. Raises ParametersDoNotFit, DataChangedError."""
    workload, model = stored_model(configuration, arrays)
    if isinstance(workload, IclWorkload):
        return evaluate_icl(workload, model)
    return evaluate_bytelm(workload, model)


def stored_model(
    configuration: Configuration, arrays: Mapping[str, np.ndarray]
) -> tuple[IclWorkload | ByteLmWorkload, Transformer]:
    """The workload, and its model with the parameters of a checkpoint. Raises ParametersDoNotFit."""
    workload = make_workload(configuration)

    def stored(name: str, drawn: np.ndarray) -> np.ndarray:
        found = arrays.get(name)
        if found is None or found.shape != drawn.shape:
            has = "is missing" if found is None else f"has shape {found.shape}"
            raise ParametersDoNotFit(
                f"the configuration's model wants {name} of shape {drawn.shape}, which {has} in the checkpoint: "
                "the run was made by another version of the model"
            )
        return found

    return workload, map_leaves({"params": workload.draw_model()}, stored)["params"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tpu.train.evaluate", description=__doc__)
    parser.add_argument("run_dir", help="the run in the bucket, gs://BUCKET/runs/NAME")
    parser.add_argument("step", type=int, help="step of a committed checkpoint")
    parser.add_argument("--out", type=Path, help="write the JSON object into this file too")
    parser.add_argument(
        "--cache",
        type=Path,
        default=relay_home() / "compile-cache",
        help="folder that keeps compiled programs between evaluations (%(default)s)",
    )
    given = parser.parse_args(arguments)
    line = json.dumps(evaluate_checkpoint(given.run_dir, given.step, given.cache))
    if given.out:
        given.out.write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
