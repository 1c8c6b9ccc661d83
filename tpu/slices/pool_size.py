"""How many slices a pool has, and which are kept: the pure rules for max_slices, min_slices and idle_minutes."""

from __future__ import annotations

from collections.abc import Iterable

from tpu.slices.lease import Lease, LeaseState
from tpu.slices.pool_settings import PoolSettings


def too_many(kept: Iterable[tuple[Lease, int]], lease: Lease, settings: PoolSettings) -> str | None:
    """Why an intent has to be withdrawn: the pool was full already without it. None if it may be carried out.

    `kept` are the leases of the pool with the generations of their objects, read after the intent was written. An
    object's generation when it is created is the place of its creation in time, so of two that write their intents
    at once both find the same one to be the later.
    """
    if settings.max_slices is None:
        return None
    place = {one.slice: _order(one, generation) for one, generation in kept}
    own = place.get(lease.slice)
    before = sum(other < own for other in place.values()) if own is not None else len(place)
    if before < settings.max_slices:
        return None
    return f"the pool {lease.pool} has {before} slices already, and {settings.max_slices} is its most (max_slices)"


def idle_too_long(leases: Iterable[Lease], settings: PoolSettings, now: float) -> list[str]:
    """Slices that nobody has used for idle_minutes, the longest idle first, but for min_slices that are kept.

    By the clocks of those who wrote them: minutes count here, not the seconds by which clocks differ.
    """
    living = [lease for lease in leases if lease.open]
    idle = sorted(
        (lease.free_since, lease.slice)
        for lease in living
        if lease.state is LeaseState.READY
        and not lease.holders
        and lease.claim is None
        and lease.free_since is not None
        and now - lease.free_since >= settings.idle_minutes * 60
    )
    return [name for _, name in idle[: max(0, len(living) - settings.min_slices)]]


def missing(leases: Iterable[Lease], settings: PoolSettings) -> int:
    """How many slices have to be made so that the pool has min_slices."""
    return max(0, settings.min_slices - sum(lease.open for lease in leases))


def keeps(leases: Iterable[Lease], settings: PoolSettings) -> bool:
    """Whether a slice in good order that its last run gives back stays in the pool, or is deleted at once."""
    return settings.idle_minutes > 0 or sum(lease.open for lease in leases) <= settings.min_slices


def _order(lease: Lease, generation: int) -> int:
    return generation if lease.order is None else lease.order
