"""Checkpoints of the XLA trainer: the JAX trainer's names, readable without XLA, exported for plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.xla.conftest import TINY_ICL, Maker
from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.restore import read_commit
from tpu.checkpoint.tree import leaves_of
from tpu.runtime.metrics import read_events
from tpu.train.evaluate import evaluate_checkpoint
from tpu.train.settings import Training
from tpu.train.step import initial_state
from tpu.train.torch_check import check_export
from tpu.train.torch_export import export_model
from tpu.train.workloads import Configuration, make_workload

BYTELM: dict[str, Any] = TINY_ICL | {
    "workload": {
        "kind": "bytelm",
        "text": ["python:pydoc_data.topics"],
        "context": 16,
        "batch": 8,
        "model": {"layers": 1, "width": 8, "heads": 2},
    }
}


@pytest.mark.parametrize("values", [TINY_ICL, BYTELM], ids=["icl", "bytelm"])
def test_a_checkpoint_is_one_of_the_jax_trainer_and_serves_plain_pytorch(
    by_hand: Maker, tmp_path: Path, values: dict[str, Any]
):
    kind = values["workload"]["kind"]
    run = by_hand(f"saved-{kind}", config=values, last_step=10, stops=[10])
    assert run.start().exit_codes() == [0], run.started[-1].output()
    files.write(
        f"{run.run_dir}/run.json", json.dumps({"config": {"name": kind, "training": values}}).encode()
    )
    restored = read_commit(run.run_dir, commit_at(load_fence(run.run_dir).commits, 10, run.run_dir))

    told = [event for _, event in read_events(run.run_dir) if event["event"] == "graphs"]
    assert [(event["recompiled"], event["fallbacks"]) for event in told] == [(0, {})] * 2
    training = Training.model_validate(values)
    theirs = leaves_of(initial_state(make_workload(Configuration(training, None))))
    ours = {n: a for n, a in restored.arrays.items() if n.startswith(("params/", "optimizer/"))}
    assert {n: (a.shape, a.dtype) for n, a in ours.items()} == {
        n: (a.shape, a.dtype) for n, a in theirs.items()
    }
    assert restored.arrays["optimizer/1/count"] == restored.arrays["scheduler/step"] == 10
    assert {n for n in restored.arrays if n not in ours} == {
        "scheduler/step", "random/xla", "random/torch", "random/numpy/keys", "random/numpy/position",
    }  # fmt: skip

    assert (
        evaluate_checkpoint(run.run_dir, 10)["workload"] == kind
    )  # by JAX, which knows nothing of XLA's trainer
    export_model(run.run_dir, 10, tmp_path / "exported")
    assert check_export(tmp_path / "exported")["agree"]
    # Where nothing of ours is installed, the folder is enough.
    alone = (
        "import sys; from model import load_exported; model, about = load_exported('.'); "
        "print(sum(p.numel() for p in model.parameters())); assert not any(n.startswith('tpu') for n in sys.modules)"
    )
    made = subprocess.run(
        [sys.executable, "-c", alone], cwd=tmp_path / "exported", capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) == sum(a.size for n, a in ours.items() if n.startswith("params/"))


def test_a_damaged_export_does_not_agree(by_hand: Maker, tmp_path: Path):
    run = by_hand("damaged", last_step=10, stops=[10])
    assert run.start().exit_codes() == [0], run.started[-1].output()
    files.write(
        f"{run.run_dir}/run.json", json.dumps({"config": {"name": "damaged", "training": TINY_ICL}}).encode()
    )
    export_model(run.run_dir, 10, tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    weights["readout.weight"] = weights["readout.weight"] * 1.1
    save_file(weights, tmp_path / "model.safetensors")
    assert not check_export(tmp_path)["agree"]
