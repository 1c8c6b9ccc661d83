"""Who computes which units and finishes which shards of the gradient, for the steps [first, until).

A table is never changed for a step that somebody may have begun, but for one thing: what a lost member had goes to
the others, who keep all that they had. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Parts of the gradient that a table deals out: a number with many divisors, so that shares are equal.
SHARDS = 120
# Equal shares are kept while they cost at most so much more than the best ones: they need the fewest bytes.
EQUAL_ENOUGH = 1.15


@dataclass(frozen=True)
class Table:
    """`units[u]` is the member that computes unit u, `shards[k]` the one that finishes shard k; `members` ascend."""

    first: int
    until: int
    members: tuple[int, ...]
    units: tuple[int, ...]
    shards: tuple[int, ...]

    def units_of(self, member: int) -> frozenset[int]:
        return frozenset(unit for unit, who in enumerate(self.units) if who == member)

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first, "until": self.until, "members": self.members, "units": self.units,
            "shards": self.shards,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Table:
        return cls(
            int(values["first"]),
            int(values["until"]),
            *(tuple(map(int, values[name])) for name in ("members", "units", "shards")),
        )


def table_of(tables: Sequence[Table], step: int) -> Table | None:
    """The table that holds for a step."""
    return next((table for table in tables if table.first <= step < table.until), None)


def deal(first: int, until: int, unit_seconds: Mapping[int, float], units: int) -> Table:
    """A new table for members with these seconds a unit: the step is over as early as can be.

    Neighbouring units go to one member, so that it adds up large nodes of the tree. A member may be so slow that it
    gets none.
    """
    members = tuple(sorted(unit_seconds))
    if not members:
        raise ValueError("a table needs a member")
    equal = {m: units * (i + 1) // len(members) - units * i // len(members) for i, m in enumerate(members)}
    best = Counter(dict.fromkeys(members, 0))
    _give(best, units, unit_seconds)
    if _longest(equal, unit_seconds) <= EQUAL_ENOUGH * _longest(best, unit_seconds):
        best = Counter(equal)
    dealt = tuple(member for member in members for _ in range(best[member]))
    shards = tuple(members[k * len(members) // SHARDS] for k in range(SHARDS))
    return Table(first, until, members, dealt, shards)


def without(table: Table, lost: int, unit_seconds: Mapping[int, float]) -> Table:
    """The table with a lost member's units and shards given to the others, who keep what they have."""
    left = tuple(member for member in table.members if member != lost)
    if not left:
        raise ValueError("the last member of a table cannot be replaced in it")
    load = Counter({member: len(table.units_of(member)) for member in left})
    # The slowest measured one stands for those not measured yet.
    seconds = {m: unit_seconds.get(m, max(unit_seconds.values(), default=1.0)) for m in left}
    takers = iter(_give(load, len(table.units_of(lost)), seconds))
    units = tuple(next(takers) if who == lost else who for who in table.units)
    count = table.shards.count(lost)
    heirs = iter(left[k * len(left) // count] for k in range(count)) if count else iter(())
    shards = tuple(next(heirs) if who == lost else who for who in table.shards)
    return replace(table, members=left, units=units, shards=shards)


def _give(load: Counter[int], count: int, seconds: Mapping[int, float]) -> list[int]:
    """Give `count` units, each to who is done with it first; who took them, neighbours to one member."""
    taken: Counter[int] = Counter()
    for _ in range(count):
        member = min(load, key=lambda m: ((load[m] + 1) * seconds[m], m))
        load[member] += 1
        taken[member] += 1
    return sorted(taken.elements())


def _longest(counts: Mapping[int, int], seconds: Mapping[int, float]) -> float:
    return max(count * seconds[member] for member, count in counts.items())
