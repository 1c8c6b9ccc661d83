"""All slices of all pools as a table: what each is, who has it and since when, and what it costs. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from tpu.money import dollar_column, in_dollars
from tpu.slices.lease import Lease, LeaseState
from tpu.slices.pool_cost import pool_cost
from tpu.slices.pool_showing import chips_text

# Beyond these a row says how many there are.
MOST_ROWS = 200
# What a person asks first comes first: a narrow page cuts a wide table off.
_COLUMNS = ("slice", "state", "who has it", "since (UTC)", "an hour", "type", "zone", "pool")


def fleet_rows(leases: Iterable[Lease], now: float) -> list[dict[str, str]]:
    """A row a slice that is there or being made, by pool and age; one that says so if there are none."""
    there = sorted(_there(leases), key=lambda lease: (lease.pool, lease.created, lease.slice))
    prices = dollar_column([lease.candidate.price_an_hour or 0.0 for lease in there])
    rows = [_row(lease, price, now) for lease, price in zip(there, prices, strict=True)]
    if more := rows[MOST_ROWS:]:
        rows = [*rows[:MOST_ROWS], _sentence(f"and {len(more)} more: `relay pool show` has them all")]
    return rows or [_sentence("no slices")]


def fleet_summary(leases: Iterable[Lease], bucket: str, now: float) -> str:
    """The table in a sentence."""
    there = _there(leases)
    cost = pool_cost(there, now)
    told = f"{len(there)} slice{'' if len(there) == 1 else 's'} of {bucket}"
    making = sum(lease.state is LeaseState.INTENDED for lease in there)
    told += f", {making} of them being made" if making else ""
    if cost.slices:
        told += f"; {in_dollars(cost.an_hour)} an hour"
        told += f", {in_dollars(cost.idle_an_hour)} of it idle" if cost.idle_an_hour else ""
        told += f"; no price of {', '.join(cost.unpriced)}" if cost.unpriced else ""
    return f"{told}. As of {_time(now)} UTC."


def _there(leases: Iterable[Lease]) -> list[Lease]:
    return [lease for lease in leases if lease.state is not LeaseState.GONE]


def _row(lease: Lease, price: str, now: float) -> dict[str, str]:
    users = [holder for holder in lease.holders if holder.chips]
    since = min((holder.since for holder in users), default=lease.free_since or lease.ready or lease.created)
    cells = (
        lease.slice,
        _state(lease, bool(users)),
        _users(lease),
        _time(since).removeprefix(f"{_time(now).partition(' ')[0]} "),  # the day, unless it is today
        "not set" if lease.candidate.price_an_hour is None else price,
        f"{lease.candidate.provisioning} {lease.candidate.accelerator_type}",
        lease.candidate.zone,
        lease.pool,
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _state(lease: Lease, used: bool) -> str:
    match lease.state:
        case LeaseState.INTENDED:
            return "being made"
        case LeaseState.QUARANTINED:
            return f"to be deleted: {lease.why}" if lease.why else "to be deleted"
        case _:
            return "in use" if used else "idle"


def _users(lease: Lease) -> str:
    told = [
        holder.run if len(holder.chips) == lease.chips else f"{holder.run}: {chips_text(lease, holder.chips)}"
        for holder in lease.holders
        if holder.chips
    ]
    if told and lease.free_chips:
        told.append(f"free: {chips_text(lease, lease.free_chips)}")
    if lease.claim is not None:
        told.append(f"wanted by {lease.claim.run}")
    return "; ".join(told) or "nobody"


def _sentence(text: str) -> dict[str, str]:
    return {"slice": text} | dict.fromkeys(_COLUMNS[1:], "")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%m-%d %H:%M")
