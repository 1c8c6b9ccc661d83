"""Start a new run from a checkpoint of another one, under other settings; the new run records its parent."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from tpu.checkpoint import files, objects
from tpu.checkpoint.checksum import crc32c
from tpu.checkpoint.digest import commit_at
from tpu.checkpoint.fence import Commit, Fence, load_fence, to_json
from tpu.checkpoint.manifest import MANIFEST
from tpu.checkpoint.manifest import to_json as manifest_to_json
from tpu.checkpoint.paths import checkpoint_url, fence_url
from tpu.checkpoint.restore import read_verified
from tpu.runs.config import apply_changes, parse_run_config
from tpu.runs.record import RunNameTaken, RunRecord, data_hash, load_record

# The checkpoint that a fork begins with was written by no attempt of its own.
FORKED_ATTEMPT = 0


def fork(parent_dir: str, step: int, run_dir: str, name: str, changes: dict[str, Any]) -> RunRecord:
    """Create the run `name` in `run_dir` from the commit of `parent_dir` at `step`.

    `changes` are dotted fields and their new values. Every byte of the checkpoint is verified on the way.

    Raises:
        tpu.checkpoint.digest.NoSuchCheckpoint: the parent has none at that step.
        tpu.checkpoint.restore.Damaged: its bytes are not what was committed.
        tpu.runs.config.RunConfigError: a changed field is wrong.
        RunNameTaken: there is a run of that name.
    """
    parent = load_record(parent_dir)
    commit = commit_at(load_fence(parent_dir).commits, step, parent_dir)
    values = parent.config.model_dump(mode="json") | {"name": name}
    apply_changes(values, changes)
    config = parse_run_config(values)
    if config.steps <= step:
        raise ValueError(
            f"the fork begins at step {step}, so it needs more than {config.steps} steps: --set steps=N"
        )
    origin = {"run": parent.config.name, "step": step}
    record = RunRecord(config, data_hash(config), parent.code, time.time(), origin)
    manifest, contents = read_verified(parent_dir, commit)
    try:
        objects.create_exclusive(f"{run_dir}/run.json", record.to_json())
    except objects.ObjectExists:
        raise RunNameTaken(f"there is a run {name} already; nothing was changed") from None
    files.write(f"{run_dir}/code.tar.gz", files.read(f"{parent_dir}/code.tar.gz"))
    folder = checkpoint_url(run_dir, step, FORKED_ATTEMPT)
    for part, data in contents.items():
        files.write(f"{folder}/{part}", data)
    own = manifest_to_json(
        dataclasses.replace(manifest, attempt=FORKED_ATTEMPT, parent=f"{parent.config.name}@{step}")
    )
    files.write(f"{folder}/{MANIFEST}", own)
    first = Commit(step, FORKED_ATTEMPT, crc32c(own))
    objects.create_exclusive(
        fence_url(run_dir), to_json(Fence(commits=(first,), closed={FORKED_ATTEMPT: first}))
    )
    return record
