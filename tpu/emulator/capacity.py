"""Who gets a slice and who does not: capacity, quota, stockouts and the creation rate.

All of it is decided by pure functions over frozen values. Counts are slices, not chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tpu.emulator import errors, zones
from tpu.emulator.errors import ApiError
from tpu.topology import AcceleratorType

Provisioning = Literal["spot", "preemptible", "on-demand", "reserved", "flex-start"]
PREEMPTIBLE: frozenset[Provisioning] = frozenset({"spot", "preemptible"})
_PREEMPTIBLE_QUOTA = PREEMPTIBLE | {"flex-start"}  # which is never preempted, but counts there
Where = tuple[str, str]  # (zone, accelerator type)

CREATIONS_PER_MINUTE = 91


@dataclass(frozen=True)
class Limits:
    """What the emulated cloud has to give. A place without an entry is unlimited."""

    capacity: Mapping[Where, int] = field(default_factory=dict)
    quota: Mapping[Where, int] = field(default_factory=dict)
    reservation: Mapping[Where, int] = field(default_factory=dict)
    stockouts: frozenset[Where] = frozenset()
    creations_per_minute: int = CREATIONS_PER_MINUTE

    def with_number(self, table: str, where: Where, number: int | None) -> Limits:
        """Return limits with one number of `capacity`, `quota` or `reservation` set, or lifted by None."""
        if number is not None and number < 0:
            raise ValueError(f"{table} of {where} must be 0 or more slices, or None for no limit: {number}")
        numbers = dict(getattr(self, table))
        numbers.pop(where, None)
        if number is not None:
            numbers[where] = number
        return replace(self, **{table: numbers})

    def with_stockout(self, where: Where, on: bool) -> Limits:
        return replace(self, stockouts=self.stockouts | {where} if on else self.stockouts - {where})


@dataclass(frozen=True)
class Ask:
    """A wish for `slices` slices of one kind in one zone."""

    zone: str
    kind: AcceleratorType
    provisioning: Provisioning
    slices: int = 1
    max_run_s: float | None = None  # of flex-start

    @property
    def where(self) -> Where:
        return self.zone, self.kind.name


@dataclass(frozen=True)
class Usage:
    """Slices of the asked kind in the asked zone.

    `holding_quota` counts everything that is not deleted, dead things too; `holding_hardware` only what
    has its hosts; `holding_reservation` the reserved ones among these.
    """

    holding_quota: int = 0
    holding_hardware: int = 0
    holding_reservation: int = 0


@dataclass(frozen=True)
class Placed:
    """The slices can be made now."""


@dataclass(frozen=True)
class Wait:
    """Not now; `reason` says what is lacking. A queued resource waits, a node's creation fails."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """No, with the API's error."""

    error: ApiError


def admit(limits: Limits, ask: Ask, usage: Usage) -> Placed | Refused:
    """Decide on the call itself, before anything exists: is there quota for it?"""
    limit = limits.quota.get(ask.where)
    if limit is None:
        return Placed()
    quota = zones.quota_name(ask.kind, preemptible=ask.provisioning in _PREEMPTIBLE_QUOTA)
    if limit == 0:
        return Refused(errors.quota_zero(quota, zones.region(ask.zone)))
    if usage.holding_quota + ask.slices > limit:
        return Refused(errors.quota_used_up(quota, limit, ask.zone))
    return Placed()


def place(limits: Limits, ask: Ask, usage: Usage) -> Placed | Wait | Refused:
    """Decide whether there is hardware now for what was admitted."""
    if ask.where in limits.stockouts:
        return Refused(errors.no_capacity(ask.zone))
    if ask.provisioning == "reserved":
        reserved = limits.reservation.get(ask.where)
        if reserved is not None and usage.holding_reservation + ask.slices > reserved:
            return Refused(errors.no_reserved_capacity())
    capacity = limits.capacity.get(ask.where)
    if capacity is not None and usage.holding_hardware + ask.slices > capacity:
        return Wait(
            f"{usage.holding_hardware} of {capacity} slices of {ask.kind.name} in {ask.zone} are in use, "
            f"{ask.slices} more wanted"
        )
    return Placed()


@dataclass(frozen=True)
class CreationBudget:
    """The token bucket of a project: full at first, refilled evenly over a minute."""

    tokens: float
    at: float  # monotonic seconds of the last change

    def spend(self, now: float, per_minute: int, count: int = 1) -> tuple[CreationBudget, bool]:
        """Return the bucket after asking for `count` creations at `now`, and whether they were granted."""
        refilled = min(per_minute, self.tokens + (now - self.at) * per_minute / 60)
        if refilled < count:
            return CreationBudget(refilled, now), False
        return CreationBudget(refilled - count, now), True
