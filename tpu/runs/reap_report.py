"""What a pass of the reaper found and did, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpu.money import in_dollars
from tpu.runs.reaping import Outcome, Reaped
from tpu.slices.lease import Lease, LeaseState
from tpu.slices.pool_cost import pool_cost
from tpu.slices.reaper import Deletion, Forgotten, Left, Sighting

# Lines of a list, beyond which a number says how many there are, and characters of a line.
MOST_LINES, LONGEST_LINE = 60, 400


def headline(reaped: Reaped) -> str:
    """The pass in one sentence."""
    count = len(reaped.plan.deletions)
    if reaped.dry_run:
        told = f"{_slices(count)} would be deleted"
        done: Sequence[Deletion] = reaped.plan.deletions
    else:
        done = [one.deletion for one in reaped.outcomes if one.confirmed]
        told = f"{_slices(len(done))} deleted"
        if open_ends := sum(one.trouble is not None for one in reaped.outcomes):
            told += f", {open_ends} not confirmed"
        if spared := sum(one.spared is not None for one in reaped.outcomes):
            told += f", {spared} spared at the last moment"
    told += f" ({saved(done)})" if done else ""
    told += f"; {_slices(len(reaped.plan.left))} of ours left alone"
    return told + (f"; {len(reaped.troubles)} troubles" if reaped.troubles else "")


def saved(deletions: Iterable[Deletion]) -> str:
    """What the deletions save: `$3.20 an hour`, with what has no price."""
    known, unknown = 0.0, 0
    for one in deletions:
        if (price := one.saves_an_hour) is None:
            unknown += 1
        else:
            known += price
    if unknown and not known:
        return "what that saves is not known: no price"
    told = f"saves {in_dollars(known)} an hour"
    return f"{told}, and {unknown} whose price is not known" if unknown else told


def figures(reaped: Reaped) -> dict[str, object]:
    """What a program wants to know of a pass."""
    done = [one.deletion for one in reaped.outcomes if one.confirmed]
    return {
        "dry_run": reaped.dry_run,
        "zones": list(reaped.zones),
        "to_delete": [one.sighting.name for one in reaped.plan.deletions],
        "deleted": [one.sighting.name for one in done],
        "unconfirmed": [one.deletion.sighting.name for one in reaped.outcomes if one.trouble is not None],
        "forgotten": [one.lease.slice for one in reaped.forgotten],
        "left": {one.name: one.reason for one in reaped.plan.left},
        "dollars_an_hour_saved": sum(one.saves_an_hour or 0.0 for one in done),
        "troubles": reaped.troubles,
    }


def to_markdown(reaped: Reaped, topped_up: Sequence[str] = ()) -> str:
    """The pass as a report. `topped_up` says what was done for pools that had too few slices."""
    told, plan = headline(reaped), reaped.plan
    lines = [f"# Reaper: {told.partition(' (')[0].partition(';')[0]}", "", f"{told}.", ""]
    if reaped.dry_run:
        lines += ["A dry run: nothing was changed.", ""]
        lines += _list("To delete", map(_deletion, plan.deletions))
        lines += _list("Leases to close", map(_lease, plan.forgotten))
    else:
        lines += _list("Troubles", reaped.troubles)
        lines += _list("Deleted", (_deletion(one.deletion) for one in reaped.outcomes if one.confirmed))
        lines += _list("Not deleted", (_undone(one) for one in reaped.outcomes if not one.confirmed))
        lines += _list("Leases closed", map(_lease, reaped.forgotten))
    if reaped.dry_run:
        lines += _list("Troubles", reaped.troubles)
    lines += _list("Left alone: please look", (_left(one) for one in plan.left if one.doubtful))
    lines += _list("Left alone", (_left(one) for one in plan.left if not one.doubtful))
    lines += _list("Pools kept at their size", topped_up)
    lines += _list("Pools now", _pools(reaped))
    others = f" {plan.strangers} more in the project are not ours." if plan.strangers else ""
    return "\n".join([*lines, f"Zones seen: {', '.join(reaped.zones) or 'all, and empty'}.{others}", ""])


def _pools(reaped: Reaped) -> Iterator[str]:
    """What each pool costs now, after this pass."""
    gone = {one.deletion.sighting.name for one in reaped.outcomes if one.confirmed}
    gone |= {one.lease.slice for one in reaped.forgotten}
    pools: dict[str, list[Lease]] = {}
    for lease in reaped.leases.values():
        if lease.slice not in gone and lease.state is not LeaseState.GONE:
            pools.setdefault(lease.pool, []).append(lease)
    for name, leases in sorted(pools.items()):
        cost = pool_cost(leases, reaped.time)
        told = f"{name}: {_slices(cost.slices)}, {in_dollars(cost.an_hour)} an hour"
        told += (
            f", {in_dollars(cost.idle_an_hour)} of it for chips that no run has" if cost.idle_an_hour else ""
        )
        yield told + (f"; no price of {', '.join(cost.unpriced)}" if cost.unpriced else "")


def _deletion(one: Deletion) -> str:
    price = one.saves_an_hour
    hourly = "price not known" if price is None else f"{in_dollars(price)} an hour"
    return f"{_slice(one.sighting)}: {one.reason}; {hourly}"


def _undone(one: Outcome) -> str:
    if one.spared is not None:
        return f"{_slice(one.deletion.sighting)}: left alone after all, {one.spared}"
    return f"{_deletion(one.deletion)}. **Not confirmed, tried again next time**: {one.trouble}"


def _lease(one: Forgotten) -> str:
    return f"**{one.lease.slice}** of the pool {one.lease.pool}: {one.reason}"


def _left(one: Left) -> str:
    return f"**{one.name}** in {one.zone} ({one.what}): {one.reason}"


def _slice(one: Sighting) -> str:
    return f"**{one.name}** in {one.zone} ({one.what})"


def _list(title: str, items: Iterable[str]) -> list[str]:
    """Lines, not a table: the reasons are sentences, and a wide table is cut off in a narrow page."""
    lines = [f"- {' '.join(item.split())[:LONGEST_LINE]}" for item in items]
    if not lines:
        return []
    more = [f"- and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [f"## {title}", "", *lines[:MOST_LINES], *more, ""]


def _slices(count: int) -> str:
    return f"{count} slice" if count == 1 else f"{count} slices"
