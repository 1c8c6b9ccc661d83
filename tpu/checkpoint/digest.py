"""One hash of a run's parameters: equal exactly when name, dtype, shape and every byte are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from tpu.checkpoint.fence import Commit, load_fence
from tpu.checkpoint.restore import newest_verified, read_commit


class NoSuchCheckpoint(LookupError):
    """The run has no commit at that step; the message lists those it has."""


def parameters_digest(arrays: Mapping[str, np.ndarray], prefix: str = "params/") -> str:
    """sha256 (hex) over the arrays whose names begin with `prefix`, in the order of their names.

    Raises:
        LookupError: no name begins with `prefix`; "" takes all.
    """
    names = sorted(name for name in arrays if name.startswith(prefix))
    if not names:
        raise LookupError(f"no array is called {prefix}…; there are: {', '.join(sorted(arrays)[:8])}")
    digest = hashlib.sha256()
    for name in names:
        array = np.asarray(arrays[name])
        digest.update(f"{name}\0{array.dtype.name}\0{list(array.shape)}\0".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def run_digest(run_dir: str, step: int | None = None, prefix: str = "params/") -> str:
    """`parameters_digest` of the run's commit at `step`, or of its newest one that verifies.

    Raises:
        NoSuchCheckpoint: there is none.
        Damaged: the one at `step` is damaged.
    """
    fence = load_fence(run_dir)
    if step is not None:
        return parameters_digest(read_commit(run_dir, commit_at(fence.commits, step, run_dir)).arrays, prefix)
    restored, _ = newest_verified(run_dir, fence)
    if restored is None:
        raise NoSuchCheckpoint(f"{run_dir} has no checkpoint whose bytes verify")
    return parameters_digest(restored.arrays, prefix)


def commit_at(commits: tuple[Commit, ...], step: int, run_dir: str) -> Commit:
    """The commit at `step`; of several attempts' the latest.

    Raises:
        NoSuchCheckpoint: there is none.
    """
    found = max((c for c in commits if c.step == step), default=None)
    if found is None:
        steps = ", ".join(str(c.step) for c in commits) or "none at all"
        raise NoSuchCheckpoint(f"{run_dir} has no checkpoint at step {step}; it has: {steps}")
    return found
