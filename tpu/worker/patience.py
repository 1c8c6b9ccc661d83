"""Patience with a Prefect server that is away, or answers 429 or 503, as Prefect Cloud does above its rates.

Prefect's client tries again a number of times, and its pauses double without end unless the server says Retry-After.
Few tries give up within seconds on a server that says "again in a second"; many sleep for as long as it was away
once more. So there are many tries here, and no pause is long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from prefect.client import base
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.utilities.math import clamped_poisson_interval

# With pauses of 30 s some five hours; ten minutes of a server that says "again in a second".
TRIES, LONGEST_PAUSE_S = 600, 30.0


def passes(error: Exception) -> bool:
    """Whether what the server did will be over at some time; a wrong key or address will not."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError | TimeoutError)


def patient_settings() -> Mapping[Any, Any]:
    """Settings for `temporary_settings`: as many tries, or those that the user wants if these are more."""
    return {PREFECT_CLIENT_MAX_RETRIES: max(TRIES, PREFECT_CLIENT_MAX_RETRIES.value())}


def shorten_pauses(longest_s: float = LONGEST_PAUSE_S) -> None:
    """From now on no try of this process waits for longer, unless the server asks for it."""

    def pause_s(average_interval: float, clamping_factor: float = 0.3) -> float:
        return clamped_poisson_interval(min(average_interval, longest_s), clamping_factor)

    base.clamped_poisson_interval = pause_s  # type: ignore[reportPrivateImportUsage]  # there is no setting for it
