"""Names of slices: the same intent always gets the same name, and no name ever comes again."""

from __future__ import annotations

import base64
import hashlib
import re

# The API's rule for ids: a lower-case letter first, then letters, digits and hyphens, no hyphen last.
LONGEST_NAME = 63
_UID_LENGTH = 8


def short_uid(*parts: str | int) -> str:
    """Eight characters [a-z2-7] that stand for `parts`, the same on every machine."""
    joined = "\0".join(str(part) for part in parts)
    digest = hashlib.sha256(joined.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:_UID_LENGTH]


def slice_name(run: str, attempt: int, uid: str, part: int = 0, again: int = 0) -> str:
    """Name of the slice that a run's attempt asks for.

    `uid` is the run's own, made once with the run, so that a later run of the same name gets other slices.
    `part` numbers the slices of a multi-slice attempt; `again` numbers creations within the attempt: a
    name that was used for a creation is not used for another one, since the cloud may still hold it.

    Raises:
        ValueError: a negative number, or an empty uid.
    """
    if min(attempt, part, again) < 0:
        raise ValueError(f"numbers must not be negative, found {attempt=} {part=} {again=}")
    if not uid:
        raise ValueError("uid must not be empty: it keeps a run of the same name from meeting our slices")
    # The hash is over the run's full name: what cutting and replacing makes equal stays apart by it.
    tail = f"-{attempt}-{short_uid(run, uid, attempt, part, again)}"
    readable = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    head = f"relay-{readable}" if readable else "relay"
    return head[: LONGEST_NAME - len(tail)].rstrip("-") + tail


def hosts_in_short(text: str, slice: str) -> str:
    """A text about one slice, in which its hosts are called w0, w1 and so on: its name has been said."""
    return text.replace(f"{slice}-w", "w")
