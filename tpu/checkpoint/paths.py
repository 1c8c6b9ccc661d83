"""Where each thing of a run lies in the bucket, and back from a path to what it names."""

from __future__ import annotations

import re

_CHECKPOINT = re.compile(r"/checkpoints/(\d+)/(\d+)(?:/|$)")


class NotABucketPath(ValueError):
    """A run directory must be `gs://bucket/...`; the message shows what was given."""


def checked_run_dir(run_dir: str) -> str:
    """`run_dir` without a trailing slash.

    Raises:
        NotABucketPath: it does not begin with gs:// or names no folder.
    """
    clean = run_dir.rstrip("/")
    if not clean.startswith("gs://") or "/" not in clean[len("gs://") :]:
        raise NotABucketPath(
            f"a run directory must look like gs://bucket/runs/NAME, found {run_dir!r}; "
            "set RELAY_RUN_DIR (or the bucket of your connection) to such a path"
        )
    return clean


def split_url(url: str) -> tuple[str, str]:
    """(bucket, object name) of a gs:// URL.

    Raises:
        NotABucketPath: it is no gs:// URL of an object.
    """
    bucket, _, name = url.removeprefix("gs://").partition("/")
    if not url.startswith("gs://") or not bucket or not name:
        raise NotABucketPath(f"an object must look like gs://bucket/name, found {url!r}")
    return bucket, name


def fence_url(run_dir: str) -> str:
    return f"{run_dir}/fence.json"


def checkpoints_url(run_dir: str) -> str:
    return f"{run_dir}/checkpoints"


def checkpoint_url(run_dir: str, step: int, attempt: int) -> str:
    return f"{run_dir}/checkpoints/{step}/{attempt}"


def checkpoint_of(path: str) -> tuple[int, int] | None:
    """(step, attempt) that an object of a run belongs to; None when it belongs to no checkpoint."""
    found = _CHECKPOINT.search(path)
    return (int(found[1]), int(found[2])) if found else None
