"""What a pool's slices have cost: the runs that had their chips, and while nobody had them. Pure, from the leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpu.money import dollar_column, in_dollars
from tpu.slices.lease import Lease, LeaseState, idle_chip_seconds, used_chip_seconds


@dataclass(frozen=True)
class PoolCost:
    """US dollars by run, and of what no run had (`idle`); `unpriced` has slice-seconds by candidate without a price.

    `an_hour` is what the slices that are there now cost an hour, `idle_an_hour` the part of it that nobody uses.
    """

    by_run: Mapping[str, float]
    idle: float
    unpriced: Mapping[str, float]
    slices: int
    an_hour: float
    idle_an_hour: float

    @property
    def dollars(self) -> float:
        return sum(self.by_run.values()) + self.idle


def pool_cost(leases: Iterable[Lease], now: float) -> PoolCost:
    """The cost of these leases up to `now`, seconds since 1970. A slice costs from ready to gone."""
    by_run: dict[str, float] = {}
    unpriced: dict[str, float] = {}
    idle = an_hour = idle_an_hour = 0.0
    slices = 0
    for lease in leases:
        if lease.ready is None:
            continue
        there = lease.state is not LeaseState.GONE
        slices += there
        price = lease.candidate.price_an_hour
        if price is None:
            end = lease.gone if lease.gone is not None else now
            kind = str(lease.candidate)
            unpriced[kind] = unpriced.get(kind, 0.0) + max(0.0, end - lease.ready)
            continue
        a_chip_second = price / 3600 / lease.chips
        for run, seconds in used_chip_seconds(lease, now).items():
            by_run[run] = by_run.get(run, 0.0) + seconds * a_chip_second
        idle += idle_chip_seconds(lease, now) * a_chip_second
        if there:
            an_hour += price
            idle_an_hour += price * len(lease.free_chips) / lease.chips
    return PoolCost(by_run, idle, unpriced, slices, an_hour, idle_an_hour)


def cost_lines(cost: PoolCost) -> list[str]:
    """The cost in words: a line a run, the dearest first, what nobody used, and what has no price."""
    rows = [*sorted(cost.by_run.items(), key=lambda row: -row[1]), ("idle", cost.idle)]
    column = dollar_column([dollars for _, dollars in rows])
    lines = [f"{name:40} {paid:>12}" for (name, _), paid in zip(rows, column, strict=True)]
    lines.append(f"{'all':40} {in_dollars(cost.dollars):>12}")
    lines += [f"{seconds / 3600:.1f} h of {kind}: price not set" for kind, seconds in cost.unpriced.items()]
    now = f"now: {cost.slices} slice(s), {in_dollars(cost.an_hour)} an hour"
    return [*lines, f"{now}, {in_dollars(cost.idle_an_hour)} of it for chips that no run has"]
