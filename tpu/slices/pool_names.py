"""Which pools there are: those that have settings or a lease, be it of a slice that is gone."""

from __future__ import annotations

from tpu.checkpoint import objects


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
