"""Checking every byte of every checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass

from tpu.checkpoint.fence import Commit, Fence, load_fence
from tpu.checkpoint.restore import Damaged, read_commit


@dataclass(frozen=True)
class Verdict:
    """What became of one commit: `damage` is None if all its bytes are what was written."""

    step: int
    attempt: int
    files: int
    bytes: int
    damage: str | None = None

    @property
    def whole(self) -> bool:
        return self.damage is None


def verify_run(run_dir: str, fence: Fence | None = None) -> list[Verdict]:
    """A verdict for each commit of the run, oldest first.

    Raises:
        StorageUnavailable: the bucket does not answer; that is no verdict.
    """
    return [verify_commit(run_dir, commit) for commit in (fence or load_fence(run_dir)).commits]


def verify_commit(run_dir: str, commit: Commit) -> Verdict:
    """Read one commit and say whether all its bytes are what was written."""
    try:
        manifest = read_commit(run_dir, commit).manifest
    except Damaged as error:
        return Verdict(commit.step, commit.attempt, 0, 0, str(error))
    return Verdict(commit.step, commit.attempt, len(manifest.files), sum(f.size for f in manifest.files))
