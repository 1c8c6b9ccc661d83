"""A pool in words: its settings, its slices, who has their chips, who waits for them, what it has cost. Pure."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import get_args

from tpu.cloud.values import Provisioning
from tpu.slices.candidate import ZONE_PATTERN, Candidate
from tpu.slices.lease import Lease, LeaseState, Span
from tpu.slices.pool_cost import pool_cost
from tpu.slices.pool_settings import PoolSettings, PoolSettingsError, in_minutes
from tpu.slices.pool_size import idle_too_long
from tpu.topology import accelerator_type

LAST_SPANS = 5
MOST_NAMES = 8


def pool_lines(name: str, settings: PoolSettings, leases: Sequence[Lease], now: float) -> list[str]:
    """The lines of `relay pool show`; `leases` with those that are gone, `now` in seconds since 1970."""
    there = [lease for lease in leases if lease.state is not LeaseState.GONE]
    idle = sum(not lease.holders and lease.state is LeaseState.READY for lease in there)
    most = "no limit" if settings.max_slices is None else settings.max_slices
    lines = [
        f"pool {name}: {len(there)} slice(s), {idle} of them idle, {len(leases) - len(there)} past",
        f"idle_minutes {settings.idle_minutes:g}, min_slices {settings.min_slices}, max_slices {most}, "
        f"evict_minutes {settings.evict_minutes:g}",
    ]
    lines += [f"min_slices are had as {candidate}" for candidate in settings.candidates]
    for lease in sorted(there, key=lambda lease: (lease.created, lease.slice)):
        lines += ["", *slice_lines(lease, settings, now)]
    cost = pool_cost(leases, now)
    if cost.by_run or cost.idle:
        lines += [
            "",
            f"cost so far: ${cost.dollars:.2f}, ${cost.idle:.2f} of it idle; now ${cost.an_hour:.2f} an hour, "
            f"${cost.idle_an_hour:.2f} of it idle",
        ]
    return lines


def to_be_reaped(name: str, settings: PoolSettings, leases: Sequence[Lease], now: float) -> str | None:
    """What by these settings is idle for too long already, and who deletes it; None if nothing is."""
    names = idle_too_long(leases, settings, now)
    if not names:
        return None
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (
        f"idle now: {', '.join(names[:MOST_NAMES])}{more}; deleted by the next `relay reap --pool {name}` (or by the "
        "reap deployment), not before"
    )


def slice_lines(lease: Lease, settings: PoolSettings, now: float) -> list[str]:
    """One slice: what it is, who has it and since when, who wants it, and its last uses."""
    why = f" ({lease.why})" if lease.why else ""
    since = lease.created if lease.ready is None else lease.ready
    lines = [f"{lease.slice}: {lease.candidate}, {lease.state.value}{why}, since {_time(since)}"]
    for holder in lease.holders:
        chips = chips_text(lease, holder.chips) if holder.chips else "no chip"
        lines.append(
            f"  {chips}: {holder.run} (priority {holder.priority}) for {_duration(now - holder.since)}"
        )
    if lease.holders and lease.free_chips:
        lines.append(f"  {chips_text(lease, lease.free_chips)}: free")
    if not lease.holders and lease.free_since is not None:
        lines.append(f"  idle for {_duration(now - lease.free_since)}")
    if (claim := lease.claim) is not None:
        left = settings.evict_minutes - max(0.0, now - claim.since) / 60
        how = (
            f"its holders leave at their next commit, or {in_minutes(left)}"
            if claim.due
            else "it waits for them"
        )
        lines.append(
            f"  {chips_text(lease, claim.chips)} wanted by {claim.run} (priority {claim.priority}): {how}"
        )
    lines += [f"  {_use(lease, span)}" for span in lease.spans[-LAST_SPANS:]]
    return lines


def _use(lease: Lease, span: Span) -> str:
    who = span.run or "nobody"
    return f"{_time(span.start)} to {_time(span.end)}  {who}, {chips_text(lease, span.chips)}"


def chips_text(lease: Lease, chips: Sequence[int]) -> str:
    """`all chips`, `chip 2` or `chips 0, 1`."""
    if len(chips) == lease.chips:
        return "all chips"
    return f"chip{'s' if len(chips) > 1 else ''} {', '.join(map(str, chips))}"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_candidate(text: str) -> Candidate:
    """A candidate out of its words, `spot v4-8 in us-central2-b` or with `at 3.22` behind, dollars an hour.

    Raises:
        PoolSettingsError: it cannot be understood.
        tpu.topology.UnknownAcceleratorType: there is no such type.
    """
    words = [word for word in text.split() if word not in ("in", "at")]
    terms = {name: name for name in get_args(Provisioning)}
    if len(words) not in (3, 4) or words[0] not in terms:
        raise PoolSettingsError(
            f"write a candidate as `spot v4-8 in us-central2-b at 3.22` (terms: {', '.join(terms)}; the price may be "
            f"left out); found {text!r}"
        )
    if not re.fullmatch(ZONE_PATTERN, words[2]):
        raise PoolSettingsError(f"the zone in {text!r} is none: write one such as us-central2-b")
    try:
        price = float(words[3].removeprefix("$")) if len(words) == 4 else None
    except ValueError:
        raise PoolSettingsError(f"the price in {text!r} is no number: {words[3]}") from None
    if price is not None and not (0 <= price < math.inf):  # neither holds for what is no number
        raise PoolSettingsError(f"the price in {text!r} must be a number of 0 or more, found {words[3]}")
    return Candidate(words[2], accelerator_type(words[1]).name, terms[words[0]], price)
