"""`max_cost`: a run that has spent it saves, cleans up and ends.

What is looked at is the run's own history, so a driver that takes a run up knows what the ones before have spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpu.clock import Clock
from tpu.money import in_dollars
from tpu.runs.config import RunConfig, RunConfigError
from tpu.runs.event_log import EventLog, RunEvent
from tpu.runs.ledger import make_sum
from tpu.runs.tenure import Tenure
from tpu.slices.provision import NoLongerWanted

WARN_SHARE = 0.8
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.2, 2.0


class MaxCostReached(NoLongerWanted):
    """The run has spent its max_cost; the message says how to let it go on."""


@dataclass(frozen=True)
class CostLook:
    """What a look at the money found. Dollars, and seconds until the next look."""

    spent: float
    reached: bool
    warn: bool
    unpriced: tuple[str, ...]
    next_s: float


def look(events: Sequence[RunEvent], max_cost: float, now: float) -> CostLook:
    """How near a run is to its limit. Pure."""
    ledger = make_sum(events, now)
    spent, rate = ledger.dollars or 0.0, ledger.dollars_an_hour / 3600
    left = max_cost - spent
    next_s = min(LONGEST_LOOK_S, left / rate) if rate > 0 else LONGEST_LOOK_S
    return CostLook(
        spent,
        left <= 0,
        spent >= WARN_SHARE * max_cost,
        tuple(ledger.unpriced_s),
        max(SHORTEST_LOOK_S, next_s),
    )


async def hold_max_cost(
    config: RunConfig,
    log: EventLog,
    tenure: Tenure,
    clock: Clock,
    others: Callable[[], Sequence[RunEvent]] = lambda: (),
) -> None:
    """Watch the money of a run until its limit is reached; then end the tenure, so that the run is left in order.

    `others` are the histories of runs that it pays for.
    """
    if config.max_cost is None:
        return
    try:
        spent = await _until_spent(config.name, config.max_cost, log, tenure.report, clock, others)
    except Exception as error:  # a limit that nobody watches is none
        tenure.interrupt(error)
        raise
    tenure.interrupt(MaxCostReached(reached_text(config.name, spent, config.max_cost)))
    await log.note("max-cost-reached", spent=spent, max_cost=config.max_cost)


async def _until_spent(
    run: str,
    limit: float,
    log: EventLog,
    report: Callable[[str], None],
    clock: Clock,
    others: Callable[[], Sequence[RunEvent]],
) -> float:
    warned, told = False, set[str]()
    noted = any(one.kind == "max-cost-warned" and one.detail["max_cost"] == limit for one in log.events)
    while not (found := look([*log.events, *others()], limit, clock.time())).reached:
        for candidate in set(found.unpriced) - told:
            report(f"{candidate} has no price: what it costs is not counted towards max_cost")
            told.add(candidate)
        if found.warn and not warned:
            warned = True
            report(
                f"{found.spent / limit:.0%} of max_cost is spent: {in_dollars(found.spent)} of {in_dollars(limit)}. "
                f"At the limit the run saves and ends; relay extend {run} --max-cost N raises it for the next start"
            )
            if not noted:
                await log.note("max-cost-warned", spent=found.spent, max_cost=limit)
        await clock.sleep(found.next_s)
    return found.spent


def check_above_spent(run: str, events: Sequence[RunEvent], limit: float | None, now: float) -> None:
    """A limit that is spent already would end the run before it has done anything. Pure.

    Raises:
        RunConfigError: the run with this history has spent `limit` dollars; the message says how much, and what to
            write.
    """
    spent = make_sum(events, now).dollars or 0.0
    if limit is not None and 0 < limit <= spent:
        raise RunConfigError(
            f"{run} has spent {in_dollars(spent)} already, so with a max_cost of {in_dollars(limit)} it could not go "
            f"on; nothing was changed. Write more than that: relay extend {run} --max-cost N, N above "
            f"{math.ceil(spent * 100) / 100:.2f}, or none"
        )


def reached_text(run: str, spent: float, limit: float) -> str:
    """What a person is told who finds the run ended."""
    return (
        f"max_cost of {in_dollars(limit)} is reached ({in_dollars(spent)} spent). "
        f"To go on: relay extend {run} --max-cost N, then python -m flows.train --resume {run}"
    )
