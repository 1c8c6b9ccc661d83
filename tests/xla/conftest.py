"""Tests of the PyTorch/XLA trainer: `make test-xla` runs them in .venv-xla; without torch_xla none is collected."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.attempts import ByHand
from tpu.emulator.gcs import GcsServer
from tpu.train import xla_device

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]

if not collect_ignore_glob:
    # As on an emulated host, and before anything imports torch_xla.
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    CAUSES = xla_device.prepare(Path(tempfile.mkdtemp()))

TINY_ICL: dict[str, Any] = {
    "workload": {
        "kind": "icl",
        "dimensions": 2,
        "examples": 4,
        "tasks": 4,
        "batch": 8,
        "model": {"layers": 1, "width": 8, "heads": 2},
    },
    "optimizer": {"learning_rate": 1e-2, "schedule": "triangle", "weight_decay": 0.01, "clip_norm": 1.0},
    "schedule_steps": 40,
    "steps_per_call": 5,
    "log_every": 5,
}


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a local bucket server, to which the environment leads."""
    folder = tmp_path_factory.mktemp("gcs")
    server = GcsServer(folder / "objects", folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        url = server.start()
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        yield url
    server.stop()


Maker = Callable[..., ByHand]


@pytest.fixture
def by_hand(gcs: str, tmp_path: Path) -> Iterator[Maker]:
    """Makes runs of the XLA trainer whose attempts the test starts; nothing of them is left afterwards."""
    made: list[ByHand] = []

    def make(name: str, **values: Any) -> ByHand:
        defaults: dict[str, Any] = {
            "program": "tpu.train.xla_trainer",
            "config": TINY_ICL,
            "last_step": 30,
            "stops": [10, 20, 30],
            "devices": 1,
        }
        folder = tmp_path / name
        folder.mkdir()
        made.append(ByHand(gcs, name, folder, **defaults | values))
        return made[-1]

    yield make
    for run in made:
        for attempt in run.started:
            attempt.kill()
