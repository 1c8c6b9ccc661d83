"""Sharded JAX arrays: each process saves its shards, and any mesh takes them back."""

from __future__ import annotations

import dataclasses
import socket
import subprocess

import numpy as np
import pytest

from tests.checkpoint.bucket import Training, opened
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.restore import Restored, restore


@pytest.fixture
def jax_run(training: Training) -> Training:
    """Steps 1 to 3, each saved while the next one runs on donated memory."""
    return dataclasses.replace(
        training,
        program="tests.trainers.jax_state",
        last_step=3,
        stop_steps=(1, 2, 3),
        environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_STATE_MESH": "8"},
    )


def newest(run_dir: str) -> Restored:
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    return restored


def assert_is_step(arrays, step: int) -> None:
    rng = np.random.default_rng(5)
    rows, columns = (rng.standard_normal(shape, dtype=np.float32) for shape in ((16, 3), (2, 16)))
    for _ in range(step):
        rows, columns = rows + np.float32(1), columns + np.float32(1)
    np.testing.assert_array_equal(arrays["params/rows"], rows)
    np.testing.assert_array_equal(arrays["params/columns"], columns)
    assert arrays["params/copy"].dtype.name == "bfloat16"
    assert arrays["count"] == step
    assert arrays["key"].dtype == np.uint32


def test_C9_saved_on_8_devices_restored_on_4(jax_run: Training):
    assert jax_run.start(1).finish() == 0
    for commit in load_fence(jax_run.run_dir).commits:
        one = restore(jax_run.run_dir, dataclasses.replace(load_fence(jax_run.run_dir), commits=(commit,)))
        assert one is not None
        assert_is_step(one.arrays, commit.step)
    shards = [p for p in newest(jax_run.run_dir).manifest.pieces if p.name == "params/rows"]
    assert len(shards) == 8
    opened(jax_run.run_dir, 2)
    fewer = dataclasses.replace(
        jax_run,
        last_step=5,
        stop_steps=(5,),
        environment={**jax_run.environment, "JAX_NUM_CPU_DEVICES": "4", "JAX_STATE_MESH": "4"},
    )
    refused = fewer.start(2)
    assert refused.finish() == 1
    assert "mesh: data=8" in refused.output
    opened(jax_run.run_dir, 3)
    allowed = fewer.start(3, RELAY_ALLOW_MIXED="1")
    assert allowed.finish() == 0
    assert_is_step(newest(jax_run.run_dir).arrays, 5)
    assert newest(jax_run.run_dir).manifest.mixed


def test_two_processes_each_save_their_shards(jax_run: Training):
    run = dataclasses.replace(
        jax_run, environment={**jax_run.environment, "JAX_NUM_CPU_DEVICES": "2", "JAX_STATE_MESH": "4"}
    )
    for attempt, last in ((1, 3), (2, 5)):
        opened(run.run_dir, attempt)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        now = dataclasses.replace(run, last_step=last, stop_steps=(1, 2, last))
        pair = [now.start(attempt, i, 2, RELAY_COORDINATOR=f"127.0.0.1:{port}") for i in range(2)]
        try:
            assert [t.finish() for t in pair] == [0, 0]
        except subprocess.TimeoutExpired:
            for trainer in pair:
                trainer.kill()
            raise
        found = newest(run.run_dir)
        assert_is_step(found.arrays, last)
        files_of = {p.file for p in found.manifest.pieces if p.name == "params/rows"}
        assert files_of == {"shards-0-0.safetensors", "shards-1-0.safetensors"}
