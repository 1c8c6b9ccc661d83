"""Which pools there are: those that have settings or a lease, be it of a slice that is gone."""

from __future__ import annotations

from difflib import get_close_matches

from tpu.checkpoint import objects

# What a run has that names no pool; it need not be made.
DEFAULT_POOL = "default"


class NoSuchPool(Exception):
    """A pool has neither settings nor slices; the message names those that are there."""


def check_there(bucket: str, pool: str) -> None:
    """Raises NoSuchPool, or tpu.checkpoint.retry.StorageUnavailable."""
    names = objects.folders(f"{bucket}/pools")
    if pool not in names:
        raise NoSuchPool(
            f"there is no pool {pool} in {bucket}, neither settings nor slices; there are: "
            f"{', '.join(names) or 'none yet'}"
        )


def check_usable(bucket: str, pool: str) -> None:
    """Refuse a pool that nobody has made: a run would have one of its own, and keep to nothing that is set.

    Raises NoSuchPool, or tpu.checkpoint.retry.StorageUnavailable.
    """
    if pool == DEFAULT_POOL:
        return
    names = objects.folders(f"{bucket}/pools")
    if pool not in names:
        others = sorted({DEFAULT_POOL, *names})
        near = get_close_matches(pool, others, 1)
        raise NoSuchPool(
            f"pool: there is none named {pool} in {bucket}"
            + (f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(others)}.")
            + f" `relay pool set {pool}` makes it"
        )
