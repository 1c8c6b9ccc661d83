"""How many slices a pool has, what is asked for and which are kept: the rules for its settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpu.slices.candidate import Candidate
from tpu.slices.lease import Lease, LeaseState
from tpu.slices.pool_settings import PoolSettings


@dataclass(frozen=True)
class Option:
    """A candidate of a pool, of which it has at most so many slices at once, dead ones counted; None: any number.

    Raises:
        ValueError: a negative number.
    """

    candidate: Candidate
    at_most: int | None = None

    def __post_init__(self) -> None:
        if self.at_most is not None and self.at_most < 0:
            raise ValueError(
                f"at_most of {self.candidate} must be 0 or more, or none for no limit; found {self.at_most}"
            )


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


# --- of a keeper ---


def at_least(settings: PoolSettings, wanted: int, candidates: tuple[Candidate, ...]) -> PoolSettings:
    """The settings of a pool of which so many slices are wanted now: no fewer than min_slices, no more than max."""
    least = max(settings.min_slices, wanted)
    most = least if settings.max_slices is None else settings.max_slices
    return replace(settings, min_slices=min(least, most), candidates=candidates)


def lacking(useful: Sequence[Lease], existing: int, settings: PoolSettings) -> int:
    """How many slices are to be asked for. What is being deleted (not `useful`) still uses quota, and counts."""
    count = missing(useful, settings)
    return count if settings.max_slices is None else max(0, min(count, settings.max_slices - existing))


def not_needed(useful: Sequence[Lease], mine: str, settings: PoolSettings, now: float) -> list[str]:
    """Slices that the pool has too many: those on their way that nobody has taken, the newest first, then those
    that have been idle for too long."""
    count = sum(lease.open for lease in useful) - settings.min_slices
    if count <= 0:
        return []
    coming = [
        lease
        for lease in useful
        if lease.state is LeaseState.INTENDED and lease.creator == mine and not lease.holders
    ]
    coming.sort(key=lambda lease: -lease.created)
    return [lease.slice for lease in coming[:count]] + idle_too_long(useful, settings, now)


def with_room(options: Sequence[Option], existing: Mapping[Candidate, int]) -> list[Candidate]:
    """Candidates of which there may be another slice, in order; `existing` counts all that use quota."""
    return [
        one.candidate
        for one in options
        if one.at_most is None or existing.get(one.candidate, 0) < one.at_most
    ]


def _order(lease: Lease, generation: int) -> int:
    return generation if lease.order is None else lease.order
