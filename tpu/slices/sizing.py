"""How many slices a keeper asks for, of which candidates, and which it gives up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpu.slices import pool_size
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


def at_least(settings: PoolSettings, wanted: int, candidates: tuple[Candidate, ...]) -> PoolSettings:
    """The settings of a pool of which so many slices are wanted now: no fewer than min_slices, no more than max."""
    least = max(settings.min_slices, wanted)
    most = least if settings.max_slices is None else settings.max_slices
    return replace(settings, min_slices=min(least, most), candidates=candidates)


def lacking(useful: Sequence[Lease], existing: int, settings: PoolSettings) -> int:
    """How many slices are to be asked for. What is being deleted (not `useful`) still uses quota, and counts."""
    count = pool_size.missing(useful, settings)
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
    return [lease.slice for lease in coming[:count]] + pool_size.idle_too_long(useful, settings, now)


def with_room(options: Sequence[Option], existing: Mapping[Candidate, int]) -> list[Candidate]:
    """Candidates of which there may be another slice, in order; `existing` counts all that use quota."""
    return [
        one.candidate
        for one in options
        if one.at_most is None or existing.get(one.candidate, 0) < one.at_most
    ]
