"""Start a new run from a checkpoint of another one, under other settings; the new run records its parent."""

from __future__ import annotations

import contextlib
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
from tpu.runs.config import RunConfig, apply_changes, parse_run_config
from tpu.runs.record import (
    RunNameTaken,
    RunNotFound,
    RunRecord,
    TooFewSteps,
    code_url,
    data_hash,
    load_record,
)

# The checkpoint that a fork begins with was written by no attempt of its own.
FORKED_ATTEMPT = 0


def fork(parent_dir: str, step: int, run_dir: str, name: str, changes: dict[str, Any]) -> RunRecord:
    """Create the run `name` in `run_dir` from the commit of `parent_dir` at `step`.

    `changes` are dotted fields and their new values. Every byte of the checkpoint is verified on the way. The record
    comes first, so that the name is ours, and the fence last: a fork that was interrupted between them does not
    start, and the same fork again finishes it.

    Raises:
        tpu.runs.record.RunNotFound: there is no such parent.
        tpu.checkpoint.digest.NoSuchCheckpoint: the parent has none at that step.
        tpu.checkpoint.restore.Damaged: its bytes are not what was committed.
        tpu.runs.config.RunConfigError: a changed field is wrong.
        TooFewSteps: the fork would end before it begins.
        RunNameTaken: there is a run of that name.
    """
    parent = load_record(parent_dir)
    commit = commit_at(load_fence(parent_dir).commits, step, parent_dir)
    config = _changed(parent.config, name, changes)
    if config.steps <= step:
        raise TooFewSteps(f"the fork begins at step {step} and would end at {config.steps}: --set steps=N")
    origin = {"run": parent.config.name, "step": step, "hash": parent.hash}
    record = RunRecord(config, data_hash(config), parent.code, time.time(), origin)
    unfinished = _unfinished(run_dir, record)
    manifest, contents = read_verified(parent_dir, commit)
    code = files.read(code_url(parent_dir, parent.code))
    if unfinished is None:
        try:
            objects.create_exclusive(f"{run_dir}/run.json", record.to_json())
        except objects.ObjectExists:
            raise _taken(name) from None
    files.write(code_url(run_dir, record.code), code)
    folder = checkpoint_url(run_dir, step, FORKED_ATTEMPT)
    for part, data in contents.items():
        files.write(f"{folder}/{part}", data)
    own = manifest_to_json(
        dataclasses.replace(manifest, attempt=FORKED_ATTEMPT, parent=f"{parent.config.name}@{step}")
    )
    files.write(f"{folder}/{MANIFEST}", own)
    first = Commit(step, FORKED_ATTEMPT, crc32c(own))
    fence = Fence(commits=(first,), closed={FORKED_ATTEMPT: first})
    with contextlib.suppress(objects.ObjectExists):  # the same fork, finished by somebody else just now
        objects.create_exclusive(fence_url(run_dir), to_json(fence))
    return unfinished or record


def _changed(config: RunConfig, name: str, changes: dict[str, Any]) -> RunConfig:
    values = config.model_dump(mode="json")
    apply_changes(values, changes)
    return parse_run_config(values | {"name": name})


def _unfinished(run_dir: str, wanted: RunRecord) -> RunRecord | None:
    """The record of this very fork if it was begun and never finished; None if the name is free."""
    try:
        existing = load_record(run_dir)
    except RunNotFound:
        return None
    same = (existing.config, existing.parent, existing.hash) == (wanted.config, wanted.parent, wanted.hash)
    if same and objects.read(fence_url(run_dir)) is None:
        return existing
    raise _taken(wanted.config.name)


def _taken(name: str) -> RunNameTaken:
    return RunNameTaken(f"there is a run {name} already; nothing was changed. Choose another name")
