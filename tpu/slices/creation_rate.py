"""One token bucket a project for creations: the API takes about 91 of them a minute. Pure.

Who wants to create reserves a token and is told how long to wait for it, so that those who come together go one
after the other instead of all coming back at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# What the API allows a project in any 60 seconds.
API_LIMIT_A_MINUTE = 91
# A clock that was further ahead than this is not believed.
_LARGEST_SKEW_S = 120.0
# So many creations are promised to those who wait, at most: more than the API takes in an hour. A file that says more
# was not written by us.
MOST_PROMISED = 60.0 * API_LIMIT_A_MINUTE


@dataclass(frozen=True)
class RateLimit:
    """`burst` creations at once, `a_minute` of them a minute in the long run.

    In no 60 seconds there are more than both together, which stay below what the API allows: another program of
    the project may create something, too.

    Raises:
        ValueError: a number below 1, or more than the API allows.
    """

    a_minute: float = 70.0
    burst: float = 12.0

    def __post_init__(self) -> None:
        if self.a_minute < 1 or self.burst < 1:
            raise ValueError(f"a creation rate has a_minute and burst of at least 1, found {self}")
        if self.a_minute + self.burst > API_LIMIT_A_MINUTE:
            raise ValueError(
                f"a creation rate must stay within the API's {API_LIMIT_A_MINUTE} a minute with its burst, found {self}"
            )


@dataclass(frozen=True)
class Tokens:
    """`left` at `at`, seconds since the epoch; negative: so many are promised to those who wait."""

    left: float
    at: float


def reserved(tokens: Tokens | None, limit: RateLimit, now: float, count: int = 1) -> tuple[Tokens, float]:
    """The bucket after reserving `count` creations, and the seconds to wait before the last of them."""
    left = limit.burst if tokens is None else _refilled(tokens, limit, now)
    left = max(left - count, -MOST_PROMISED)
    # A clock that is behind must not turn the bucket back: the time in between would be refilled twice.
    at = now if tokens is None or _ahead(tokens, now) else max(now, tokens.at)
    wait_s = max(0.0, -left) * 60.0 / limit.a_minute
    return Tokens(left, at), wait_s + (at - now if wait_s > 0 else 0.0)


def emptied(tokens: Tokens | None, now: float) -> Tokens:
    """The bucket after the API has refused a creation as one too many: nobody creates before it is refilled."""
    left = 0.0 if tokens is None else min(tokens.left, 0.0)
    return Tokens(left, now if tokens is None or _ahead(tokens, now) else max(now, tokens.at))


def _refilled(tokens: Tokens, limit: RateLimit, now: float) -> float:
    if _ahead(tokens, now):
        return min(tokens.left, limit.burst)
    passed = max(0.0, now - tokens.at)
    return min(limit.burst, tokens.left + passed * limit.a_minute / 60.0)


def _ahead(tokens: Tokens, now: float) -> bool:
    return tokens.at > now + _LARGEST_SKEW_S


def to_json(tokens: Tokens | None) -> dict[str, Any]:
    return {} if tokens is None else {"left": tokens.left, "at": tokens.at}


def from_json(values: Any) -> Tokens | None:
    """Raises ValueError, TypeError, KeyError or AttributeError if `values` are no tokens.

    Numbers that cannot be ours are as none at all: nobody waits for them, and the next who reserves replaces them.
    """
    if not values:
        return None
    tokens = Tokens(float(values["left"]), float(values["at"]))
    # The comparison does not hold for what is no number either.
    ours = -MOST_PROMISED <= tokens.left <= API_LIMIT_A_MINUTE and math.isfinite(tokens.at)
    return tokens if ours else None
