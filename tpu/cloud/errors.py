"""From the cloud's codes and texts to kinds of error that decisions can be made on.

Quota and stockout share code 8: only the text separates them. `classify` is pure; its table test holds
every wording that is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum


class ErrorKind(Enum):
    """What an error asks for; each value is how it is said in messages."""

    STOCKOUT = "no capacity"
    RESERVATION_FULL = "reservation full"
    NO_QUOTA = "no quota at all"
    QUOTA_EXHAUSTED = "quota used up"
    RATE_LIMITED = "too many requests"
    PREEMPTED = "preempted while being made"
    NOT_OFFERED = "accelerator type not offered in the zone"
    NO_QUEUE = "the zone has no queued resources"
    PERMISSION = "wrong zone or missing rights"
    BAD_REQUEST = "request refused"
    NOT_FOUND = "not found"
    ALREADY_EXISTS = "already exists"
    CONFLICT = "name taken by something else"
    WRONG_STATE = "not possible in its present state"
    UNAVAILABLE = "cloud not reachable"
    INTERNAL = "internal error of the cloud"
    TIMED_OUT = "not made in time"
    DELETED = "deleted by somebody else"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown error"


_NEXT_STEP = {
    ErrorKind.STOCKOUT: "Try another zone or accelerator type, or wait.",
    ErrorKind.RESERVATION_FULL: "Free a slice of the reservation, enlarge it, or use spot.",
    ErrorKind.NO_QUOTA: "Ask for that quota, or use a zone and provisioning model that you have quota for.",
    ErrorKind.QUOTA_EXHAUSTED: "Delete slices that nobody needs (dead ones count too), or use another zone.",
    ErrorKind.RATE_LIMITED: "Slow down; it is tried again later.",
    ErrorKind.PREEMPTED: "It is deleted and made again; nothing to do.",
    ErrorKind.NOT_OFFERED: "Choose a zone that offers the type, or a type that the zone offers.",
    ErrorKind.NO_QUEUE: "Ask for a plain node there.",
    ErrorKind.PERMISSION: "Check the zone's spelling, the project and the rights of the credentials in use.",
    ErrorKind.BAD_REQUEST: "Correct the setting that the message names.",
    ErrorKind.CONFLICT: "Choose another name, or delete what has that name by hand if it is yours.",
    ErrorKind.UNAVAILABLE: "Check the network and the API's address; it is safe to try again.",
    ErrorKind.INTERNAL: "Use another zone, or try again later.",
    ErrorKind.TIMED_OUT: "Allow more time, or use another zone or provisioning model.",
}

# The same request will be refused for ever: somebody has to change something first.
_PERMANENT = frozenset(
    {
        ErrorKind.NO_QUOTA,
        ErrorKind.NOT_OFFERED,
        ErrorKind.NO_QUEUE,
        ErrorKind.PERMISSION,
        ErrorKind.BAD_REQUEST,
        ErrorKind.CONFLICT,
    }
)


class CloudError(Exception):
    """The cloud refused, failed, or could not be asked.

    `code` is the google.rpc code (0 if there is none). `in_operation` is True when the request was
    accepted and failed later, so that something may have been made.
    """

    def __init__(
        self, kind: ErrorKind, code: int, message: str, *, wanted: str = "", in_operation: bool = False
    ) -> None:
        self.kind = kind
        self.code = code
        self.message = message
        self.wanted = wanted
        self.in_operation = in_operation
        text = f"{wanted}: {kind.value}: {message}" if wanted else f"{kind.value}: {message}"
        next_step = _NEXT_STEP.get(kind)
        super().__init__(f"{text} (code {code}). {next_step}" if next_step else f"{text} (code {code})")

    @property
    def permanent(self) -> bool:
        """True if the same request can never succeed until a person changes something."""
        return self.kind in _PERMANENT

    @property
    def retryable(self) -> bool:
        """True if asking again, here or elsewhere, makes sense without anybody changing anything."""
        return not self.permanent

    @property
    def quota(self) -> str | None:
        """Name of the quota that the message is about."""
        return quota_name(self.message)


# REST answers carry HTTP codes; all of them lie above the google.rpc codes.
_HTTP_TO_RPC = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 412: 9, 429: 8, 499: 1, 500: 13, 502: 14, 503: 14,
                504: 4}  # fmt: skip

_BY_CODE = {
    1: ErrorKind.CANCELLED,
    3: ErrorKind.BAD_REQUEST,
    4: ErrorKind.UNAVAILABLE,  # no answer in time: the request may have been carried out
    5: ErrorKind.NOT_FOUND,
    6: ErrorKind.ALREADY_EXISTS,
    7: ErrorKind.PERMISSION,
    # Exhausted, and the text says neither quota nor rate: what stockout asks for (back off here, try
    # elsewhere) is right for whatever it is.
    8: ErrorKind.STOCKOUT,
    9: ErrorKind.WRONG_STATE,
    10: ErrorKind.UNAVAILABLE,  # aborted by a concurrent change
    11: ErrorKind.BAD_REQUEST,
    12: ErrorKind.BAD_REQUEST,
    13: ErrorKind.INTERNAL,
    14: ErrorKind.UNAVAILABLE,
    16: ErrorKind.PERMISSION,
}

# Tried in order, within the codes named; the first that matches decides, else the code alone does.
_BY_TEXT: tuple[tuple[frozenset[int], re.Pattern[str], ErrorKind], ...] = tuple(
    (frozenset(codes), re.compile(pattern, re.IGNORECASE), kind)
    for codes, pattern, kind in [
        ({8, 9}, r"reserved capacity|reservation", ErrorKind.RESERVATION_FULL),
        ({8}, r"per ?minute|rate.?limit|RATE_LIMIT_EXCEEDED|too many requests", ErrorKind.RATE_LIMITED),
        ({7, 8, 9}, r"quota.*\blimit:? 0(?![\d.,]*\d)", ErrorKind.NO_QUOTA),
        ({8, 9}, r"quota", ErrorKind.QUOTA_EXHAUSTED),
        (
            {8, 9, 13, 14},
            r"no more capacity|(insufficient|not enough|no available) (capacity|resources)"
            r"|RESOURCE_POOL_EXHAUSTED",
            ErrorKind.STOCKOUT,
        ),
        ({3, 9}, r"while in state (PREEMPTED|TERMINATED|SUSPEND)", ErrorKind.PREEMPTED),
        ({3, 9}, r"while in state \w+", ErrorKind.WRONG_STATE),
        (
            {3, 5, 9},
            r"accelerator (configuration|type).*(could not be found|not found|not available|not supported)",
            ErrorKind.NOT_OFFERED,
        ),
        (
            {3, 9, 12},
            r"queued.?resources? .*(not|n't) (be )?(supported|available|enabled|offered)"
            r"|not (support|offer|have) .*queued.?resource",
            ErrorKind.NO_QUEUE,
        ),
    ]
)


def classify(code: int, message: str, details: Sequence[str] = ()) -> ErrorKind:
    """The kind of an error, by google.rpc (or HTTP) code, message, and texts of its details."""
    code = _HTTP_TO_RPC.get(code, code)
    text = " ".join((message, *details))
    for codes, pattern, kind in _BY_TEXT:
        if code in codes and pattern.search(text):
            return kind
    return _BY_CODE.get(code, ErrorKind.UNKNOWN)


def quota_name(message: str) -> str | None:
    """The quoted name of the quota in a message, if it is about one."""
    found = re.search(r"quota (?:limit |metric )?['\"]([^'\"]+)['\"]", message, re.IGNORECASE)
    return found.group(1) if found else None
