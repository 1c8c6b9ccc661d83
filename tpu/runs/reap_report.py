"""What a pass of the reaper found and did, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpu.runs.ledger import in_dollars
from tpu.runs.reaping import Outcome, Reaped
from tpu.slices.reaper import Deletion

# Rows of a table; beyond them a number says how many there are.
MOST_ROWS = 60


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
    lines = [f"# Reaper: {headline(reaped)}", ""]
    if reaped.dry_run:
        lines += ["A dry run: nothing was changed.", ""]
    if reaped.troubles:
        lines += ["## Troubles", "", *(f"- {_cell(trouble)}" for trouble in reaped.troubles), ""]
    rows = [_row(one.deletion, _told(one)) for one in reaped.outcomes]
    if reaped.dry_run:
        rows = [_row(one, "would be deleted") for one in reaped.plan.deletions]
    lines += _table("Deleted" if not reaped.dry_run else "To delete",
                    ("slice", "zone", "what", "why", "an hour", "outcome"), rows)  # fmt: skip
    lines += _table(
        "Leases closed", ("slice", "pool", "why"),
        [(one.lease.slice, one.lease.pool, one.reason)
         for one in (reaped.plan.forgotten if reaped.dry_run else reaped.forgotten)],
    )  # fmt: skip
    doubtful = [one for one in reaped.plan.left if one.doubtful]
    calm = [one for one in reaped.plan.left if not one.doubtful]
    for title, left in (("Left alone: please look", doubtful), ("Left alone", calm)):
        lines += _table(
            title, ("slice", "zone", "what", "why"),
            [(one.name, one.zone, one.what, one.reason) for one in left],
        )  # fmt: skip
    if topped_up:
        lines += ["## Pools kept at their size", "", *(f"- {_cell(text)}" for text in topped_up), ""]
    strangers = reaped.plan.strangers
    others = f" {strangers} more in the project are not ours." if strangers else ""
    return "\n".join([*lines, f"Zones seen: {', '.join(reaped.zones) or 'all, and empty'}.{others}", ""])


def _told(outcome: Outcome) -> str:
    if outcome.spared is not None:
        return f"left alone: {outcome.spared}"
    return (
        "deleted" if outcome.trouble is None else f"NOT CONFIRMED, tried again next time: {outcome.trouble}"
    )


def _row(one: Deletion, outcome: str) -> tuple[str, ...]:
    price = one.saves_an_hour
    hourly = "not known" if price is None else in_dollars(price)
    return one.sighting.name, one.sighting.zone, one.sighting.what, one.reason, hourly, outcome


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines += ["", f"and {len(rows) - MOST_ROWS} more"]
    return [*lines, ""]


def _slices(count: int) -> str:
    return f"{count} slice" if count == 1 else f"{count} slices"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]
