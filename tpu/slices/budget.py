"""How often each verdict may recur before a run gives up, and how long to wait before it goes on. Pure.

Preemption and failure never share a budget: a run that is preempted a hundred times has not failed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu.slices.verdict import VerdictKind

# Seconds before the next attempt: (first, longest). It doubles with each verdict of the kind in a row.
# After a preemption nothing is gained by waiting: whether a zone has capacity is provisioning's business. Nor is
# there after one failed host or slice, which chance explains; the second in a row may be a pattern.
_BACK_OFF_S: Mapping[VerdictKind, tuple[float, float]] = {
    VerdictKind.PREEMPTED: (0.0, 0.0),
    VerdictKind.INFRASTRUCTURE: (1.0, 300.0),
    VerdictKind.USER_FAILURE: (1.0, 60.0),
}


@dataclass(frozen=True)
class Allowed:
    """Another attempt may start, after `backoff_s` seconds."""

    backoff_s: float


@dataclass(frozen=True)
class Exhausted:
    """No other attempt; the reason is for the run's report."""

    reason: str


@dataclass(frozen=True)
class Budgets:
    """How many times each verdict may come and be answered by another attempt; None is without limit.

    So with `user_failure=2` the third failure ends the run.

    Raises:
        ValueError: a negative budget.
    """

    preemption: int | None = None
    infrastructure: int | None = 20
    user_failure: int | None = 2

    def __post_init__(self) -> None:
        for name in ("preemption", "infrastructure", "user_failure"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"budget {name} must be 0 or more, or none for no limit; found {value}")

    def limit(self, kind: VerdictKind) -> int | None:
        """The budget of a kind; verdicts that end a run have 0."""
        limits = {
            VerdictKind.PREEMPTED: self.preemption,
            VerdictKind.INFRASTRUCTURE: self.infrastructure,
            VerdictKind.USER_FAILURE: self.user_failure,
        }
        return limits.get(kind, 0)


def allows(budgets: Budgets, verdicts: Sequence[VerdictKind]) -> Allowed | Exhausted:
    """Whether another attempt may follow these verdicts, all of the run's, in order."""
    if not verdicts:
        return Allowed(0.0)
    last = verdicts[-1]
    if last is VerdictKind.FINISHED:
        return Exhausted("the run is finished")
    if last is VerdictKind.CANCELLED:
        return Exhausted("the run was cancelled")
    limit, count = budgets.limit(last), spent(verdicts)[last]
    if limit is not None and count > limit:
        return Exhausted(
            f"{count} times {last.value}, and the budget for it is {limit}: raise the budget, or look at "
            "the reasons of the verdicts"
        )
    return Allowed(back_off_s(verdicts))


def spent(verdicts: Sequence[VerdictKind]) -> dict[VerdictKind, int]:
    """How many there were of each kind."""
    return {kind: sum(verdict is kind for verdict in verdicts) for kind in VerdictKind}


def back_off_s(verdicts: Sequence[VerdictKind]) -> float:
    """Seconds to wait before the next attempt; it doubles while the same verdict comes again in a row."""
    if not verdicts:
        return 0.0
    first, longest = _BACK_OFF_S.get(verdicts[-1], (0.0, 0.0))
    in_a_row = sum(1 for _ in itertools.takewhile(lambda kind: kind is verdicts[-1], reversed(verdicts)))
    if verdicts[-1] is VerdictKind.INFRASTRUCTURE:
        in_a_row -= 1
    if in_a_row == 0:
        return 0.0
    # The exponent is bounded: 2.0**1024 overflows, and a run may see more preemptions than that.
    return min(longest, first * 2.0 ** min(in_a_row - 1, 32))
