"""A checkpoint as plain files for other programs: one safetensors file and the configuration beside it."""

from __future__ import annotations

import json
from pathlib import Path

from tpu.checkpoint import files
from tpu.checkpoint.digest import commit_at
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.paths import checked_run_dir
from tpu.checkpoint.restore import Restored, read_commit
from tpu.checkpoint.shards import encode


def export(run_dir: str, step: int, dest: str | Path) -> list[str]:
    """Write `<run>-step<N>.safetensors` and `<run>-step<N>.json` under `dest`, a local folder or a gs:// one;
    returns their paths.

    The JSON holds run, step, attempt, environment and, if the run has one, its configuration (run.json).

    Raises:
        NoSuchCheckpoint: the run has no commit at `step`.
        Damaged: its bytes do not verify.
    """
    run_dir = checked_run_dir(run_dir)
    restored = read_commit(run_dir, commit_at(load_fence(run_dir).commits, step, run_dir))
    stem = f"{run_dir.rpartition('/')[2]}-step{step}"
    contents = {
        f"{stem}.safetensors": encode(restored.arrays),
        f"{stem}.json": json.dumps(_about(run_dir, restored), indent=1).encode(),
    }
    return [_write(str(dest).rstrip("/"), name, content) for name, content in contents.items()]


def _about(run_dir: str, restored: Restored) -> dict[str, object]:
    try:
        configuration = json.loads(files.read(f"{run_dir}/run.json"))
    except FileNotFoundError:
        configuration = None
    return {
        "run": run_dir,
        "step": restored.step,
        "attempt": restored.attempt,
        "environment": dict(restored.manifest.environment),
        "mixed": restored.manifest.mixed,
        "configuration": configuration,
    }


def _write(dest: str, name: str, content: bytes) -> str:
    path = f"{dest}/{name}"
    if dest.startswith("gs://"):
        files.write(path, content)
    else:
        Path(dest).mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    return path
