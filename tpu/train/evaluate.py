"""Evaluate one checkpoint of a run on any machine: `python -m tpu.train.evaluate RUN_DIR STEP [--out FILE]`.

Reads the run's configuration and the committed checkpoint from the bucket; prints one JSON object as its
last line. Needs no TPU: a checkpoint is plain arrays in host memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at, parameters_digest
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checked_run_dir
from tpu.checkpoint.restore import read_commit
from tpu.checkpoint.tree import map_leaves
from tpu.train.evaluation import evaluate_bytelm, evaluate_icl
from tpu.train.icl import IclWorkload
from tpu.train.workloads import Configuration, make_workload


class ParametersDoNotFit(ValueError):
    """The checkpoint's parameters are not those of the run's model."""


def evaluate_checkpoint(run_dir: str, step: int) -> dict[str, Any]:
    """The evaluation of the commit at `step`: `step`, `attempt`, `parameters_sha256`, and the workload's figures.

    Raises NoSuchCheckpoint, Damaged, ParametersDoNotFit, DataChangedError, or ValueError for a run of a
    command of its own.
    """
    run_dir = checked_run_dir(run_dir)
    configuration = Configuration.from_run_record(files.read(f"{run_dir}/run.json"))
    restored = read_commit(run_dir, commit_at(load_fence(run_dir).commits, step, run_dir))
    figures = evaluate_arrays(configuration, restored.arrays)
    digest = parameters_digest(restored.arrays)
    return {"step": step, "attempt": restored.attempt, "parameters_sha256": digest, **figures}


def evaluate_arrays(configuration: Configuration, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The figures for parameters given as the arrays `params/…`. Raises ParametersDoNotFit, DataChangedError."""
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

    model = map_leaves({"params": workload.draw_model()}, stored)["params"]
    if isinstance(workload, IclWorkload):
        return evaluate_icl(workload, model)
    return evaluate_bytelm(workload, model)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tpu.train.evaluate", description=__doc__)
    parser.add_argument("run_dir", help="the run in the bucket, gs://BUCKET/runs/NAME")
    parser.add_argument("step", type=int, help="step of a committed checkpoint")
    parser.add_argument("--out", type=Path, help="write the JSON object into this file too")
    given = parser.parse_args(arguments)
    line = json.dumps(evaluate_checkpoint(given.run_dir, given.step))
    if given.out:
        given.out.write_text(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
