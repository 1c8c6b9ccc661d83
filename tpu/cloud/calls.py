"""One call of the API: a time limit a try, tries again under a deadline, errors as CloudError.

No method of the client library has a default time-out or retry, so every call goes through here.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions

from tpu.clock import Clock
from tpu.cloud.convert import detail_texts
from tpu.cloud.errors import CloudError, ErrorKind, classify

Result = TypeVar("Result")

# What may be tried again at once without harm. A creation is safe to repeat since names are deterministic,
# but its errors belong to the caller, who may want to go to another zone instead.
READ = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.RATE_LIMITED, ErrorKind.UNKNOWN})
DELETE = READ
CREATE = frozenset({ErrorKind.UNAVAILABLE})


@dataclass(frozen=True)
class CallPolicy:
    """Limits of one call, in seconds: each try, all tries together, and the pauses between them.

    Tries that have failed for `tell_after_s` are told of, so that nobody thinks that we hang.
    `page_size` is how many entries one answer of a list may have; lists are always read to their end.
    """

    try_s: float = 15.0
    total_s: float = 45.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    tell_after_s: float = 5.0
    page_size: int = 500

    def __post_init__(self) -> None:
        if not 0 < self.try_s <= self.total_s:
            raise ValueError(
                f"try_s must be above 0 and at most total_s, found {self.try_s} and {self.total_s}"
            )


async def call(
    attempt: Callable[[float], Awaitable[Result]],
    *,
    wanted: str,
    retry_on: frozenset[ErrorKind],
    policy: CallPolicy,
    clock: Clock,
    chance: random.Random,
    tell: Callable[[CloudError], None] = lambda _: None,
) -> Result:
    """Run `attempt(timeout_s)` until it succeeds, fails for good, or the policy's time is over.

    `tell` gets the error of a try that is made again after they have failed for `policy.tell_after_s`. `chance` draws
    the pauses between them.

    Raises:
        CloudError: the last error; `wanted` says in it what the call was for.
    """
    began = clock.monotonic()
    end = began + policy.total_s
    pause = policy.first_pause_s
    while True:
        remaining = end - clock.monotonic()
        try:
            return await attempt(max(0.001, min(policy.try_s, remaining)))
        except api_exceptions.GoogleAPICallError as error:
            failure = cloud_error(error, wanted)
            cause: Exception = error
        except auth_exceptions.TransportError as error:
            failure = CloudError(ErrorKind.UNAVAILABLE, 0, f"no credentials yet: {error}", wanted=wanted)
            cause = error
        except auth_exceptions.GoogleAuthError as error:
            raise CloudError(ErrorKind.PERMISSION, 0, f"no credentials: {error}", wanted=wanted) from error
        # Jitter, so that many waiting flows do not come back at the same moment.
        wait = pause * chance.uniform(0.7, 1.0)
        if failure.kind not in retry_on or clock.monotonic() + wait >= end:
            raise failure from cause
        if clock.monotonic() - began >= policy.tell_after_s:
            tell(failure)
        await clock.sleep(wait)
        pause = min(2 * pause, policy.longest_pause_s)


def cloud_error(error: api_exceptions.GoogleAPICallError, wanted: str) -> CloudError:
    """The client library's error of a call as ours."""
    grpc_code = error.grpc_status_code
    code = grpc_code.value[0] if grpc_code is not None else int(error.code or 2)
    message = error.message or str(error)
    kind = classify(code, message, detail_texts(error.details))
    return CloudError(kind, code, message, wanted=wanted)
