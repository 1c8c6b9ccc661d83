"""Trying again what a network or an overloaded server refused, and only that."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# Answers of the storage service that pass by themselves.
_PASSING_CODES = frozenset({408, 429, 500, 502, 503, 504})
# Network errors of the HTTP libraries under gcsfs and google-cloud-storage, by name: naming them by class
# would import all of those libraries at the start of every training process.
_PASSING_NAMES = frozenset(
    {
        "ClientError", "ServerDisconnectedError", "ClientConnectorError", "ClientOSError",
        "ClientPayloadError", "ChunkedEncodingError", "ConnectionError", "ConnectTimeout", "ReadTimeout",
        "Timeout", "ProxyError", "TransportError", "RetryError", "ChecksumError",
        "FSTimeoutError",
    }
)  # fmt: skip


class StorageUnavailable(Exception):
    """The bucket did not answer within the deadline; the message names what was tried and the last error."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how densely to try again.

    `deadline_s` bounds all tries together; waits double from `first_s` up to `longest_s`, each shortened by
    up to half at random so that the hosts of a slice do not come back in step.
    """

    deadline_s: float = 60.0
    first_s: float = 0.25
    longest_s: float = 8.0


DEFAULT_RETRY = RetryPolicy()


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later: network trouble, 429, 408 and 5xx; never 403 or 404."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    code = getattr(error, "code", None)
    if isinstance(code, int) or (isinstance(code, str) and code.isdigit()):
        return int(code) in _PASSING_CODES
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def retrying(
    what: str,
    action: Callable[[], T],
    policy: RetryPolicy = DEFAULT_RETRY,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Do `action`, again after passing errors, until `policy.deadline_s` is over.

    Raises:
        StorageUnavailable: every try met a passing error until the deadline; `what` is in the message.
        Exception: any error that does not pass, as it was raised.
    """
    began, tries, wait_s = clock(), 0, policy.first_s
    while True:
        tries += 1
        try:
            return action()
        except Exception as error:  # sorted at once: only passing errors stay here
            if not is_passing(error):
                raise
            waited = clock() - began
            if waited + wait_s > policy.deadline_s:
                raise StorageUnavailable(
                    f"{what}: the bucket refused {tries} tries over {waited:.0f} s, lastly with "
                    f"{type(error).__name__}: {error}"
                ) from error
        sleep(wait_s * (1 - random.random() / 2))
        wait_s = min(wait_s * 2, policy.longest_s)
