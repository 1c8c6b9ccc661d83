"""US dollars as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def dollar_column(amounts: Sequence[float]) -> list[str]:
    """Amounts as `in_dollars` shows their sum, rounded so that they add up to it: a column that does not is not
    believed."""
    digits = _digits(sum(amounts))
    unit = 10.0**digits
    floors = [math.floor(amount * unit) for amount in amounts]
    short = round(sum(amounts) * unit) - sum(floors)
    by_remainder = sorted(range(len(amounts)), key=lambda i: floors[i] - amounts[i] * unit)
    for i in by_remainder[: max(0, short)]:
        floors[i] += 1
    return [f"${floor / unit:,.{digits}f}" for floor in floors]


def in_dollars(amount: float) -> str:
    """`$12.34`; of less than a dollar four digits, since a short run on one chip costs fractions of a cent."""
    return f"${amount:,.{_digits(amount)}f}"


def _digits(amount: float) -> int:
    return 2 if amount >= 1 or amount == 0 else 4
