"""What the last lines of a host's log say about why it ended. Pure.

The first line that decides is the one that counts: what a program prints after it (a barrier that fails
while a crashed process shuts down, say) follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Clue(Enum):
    """Kinds of lines that decide."""

    CHIPS_BUSY = "chips are held by another process"
    CHIPS_BROKEN = "chips or their links do not work"
    PEER_DIED = "another process of the gang went away"
    OWN_ERROR = "the program raised an error"


@dataclass(frozen=True)
class Found:
    """The line that decided, and what it says."""

    clue: Clue
    line: str


_CHIPS_BUSY = re.compile(
    r"/dev/(vfio/\S*|accel\d*).*\bbusy\b"
    r"|\bbusy\b.*/dev/(vfio|accel)"
    r"|TPU is already in use"
    r"|TPU.*in use by (another )?process"
    r"|libtpu_lockfile"
    r"|libtpu.*already in use",
    re.IGNORECASE,
)

# No program can bring these about: they are the machine's.
_CHIPS_BROKEN = re.compile(
    r"uncorrectable\b.*\b(ecc|hbm|memory|error)"
    r"|(failed to|could(n't| not)|cannot|unable to) open (iommu group )?/dev/(vfio/\S*|accel\d+)"
    r"|open\(/dev/(vfio/\S*|accel\d+)\): (no such (file|device)|input/output error)"
    r"|no ba16c7433 device found"
    r"|\bICI\b.*\b(link|links)\b.*\b(down|fail|failed|error)"
    r"|\b(tpu|chip|accelerator)\b.* (fell off|is not on) the (bus|pcie bus)"
    r"|pcie? .*(uncorrectable|fatal) error",
    re.IGNORECASE,
)

_PEER_DIED = re.compile(
    r"socket closed"
    r"|connection (closed|reset) by peer"
    r"|\bbarrier\b.*(fail|error|time|timed|cancel|abort|deadline)"
    r"|(fail|error|time|timed|cancel|abort|deadline)\w*\b.*\bbarrier\b"
    r"|heartbeat.*(time|miss|lost|fail)"
    r"|JAX distributed service (detected|shut)"
    r"|(CoordinationService|coordination service|coordination agent)"
    r".*(error|unavailable|unreachable|shut|disconnect|fail|stopped)"
    r"|another task (died|failed)"
    r"|(task|peer|worker)s? .*(disconnected|is unreachable|has been lost|went away)"
    r"|gloo.*(timed? ?out|connectFullMesh|connect failed|pair\.cc)"
    r"|MEGASCALE.*(unreachable|timed? ?out|connection)"
    r"|slice health check failed"
    r"|failed to connect to all addresses"
    r"|waiting for clients.*\b\d+/\d+ clients joined"
    r"|broken pipe.*(gloo|grpc|coordination)",
    re.IGNORECASE,
)

# The last line of a Python traceback: a dotted class name that ends as exceptions do, at the line's start.
_RAISED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\b(?::|$)"
)
_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\)")
# A class of any name ends a traceback too, but only where one has begun.
_ANY_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::\s|$)")


# What a program raises by its own mistake, on whatever machine it runs.
_MISTAKE = re.compile(
    r"\b(Name|Import|ModuleNotFound|Syntax|Indentation|Key|Index|Type|Attribute|Value|Assertion|ZeroDivision"
    r"|NotImplemented|UnboundLocal|Validation)Error\b"
)


def is_mistake(line: str) -> bool:
    """Whether a line names an error that no machine can bring about."""
    return _MISTAKE.search(line) is not None


def first_clue(lines: Sequence[str]) -> Found | None:
    """The first line that decides, or None if none does."""
    in_traceback = False
    for line in lines:
        text = line.strip()
        if _CHIPS_BUSY.search(text):
            return Found(Clue.CHIPS_BUSY, text)
        if _CHIPS_BROKEN.search(text):
            return Found(Clue.CHIPS_BROKEN, text)
        if in_traceback and line[:1].isspace():
            continue  # source lines may hold any words
        if _PEER_DIED.search(text):
            return Found(Clue.PEER_DIED, text)
        if _TRACEBACK.match(line):
            in_traceback = True
        elif _RAISED.match(line) or (in_traceback and _ANY_RAISED.match(line)):
            return Found(Clue.OWN_ERROR, text)
    return None
