"""What was found of one condition, in a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tpu.cloud.project import ProjectUnknown, Why


class State(Enum):
    """How a condition is; each value is how its line begins."""

    HOLDS = "ok"
    WRONG = "WRONG"
    UNKNOWN = "?"


@dataclass(frozen=True)
class Finding:
    """One condition: what was looked at, how it is, what was found, and what mends it."""

    what: str
    state: State
    text: str
    mend: str = ""

    def __str__(self) -> str:
        mend = f"; mend: {self.mend}" if self.mend else ""
        return f"{self.state.value:5} {self.what}: {' '.join(self.text.split())}{mend}"


def good(what: str, text: str) -> Finding:
    return Finding(what, State.HOLDS, text)


def wrong(what: str, text: str, mend: str = "") -> Finding:
    return Finding(what, State.WRONG, text, mend)


def unknown(what: str, text: str, mend: str = "") -> Finding:
    return Finding(what, State.UNKNOWN, text, mend)


def not_told(what: str, error: ProjectUnknown, project: str) -> Finding:
    """A condition that a service would not tell of: no mistake yet, but nobody knows."""
    if error.why is Why.API_OFF:
        text = f"not looked at, since the API that tells it is off ({error.service}.googleapis.com)"
        return unknown(what, text, enable(error.service, project))
    return unknown(what, f"not to be learned ({error})")


def enable(service: str, project: str) -> str:
    return f"gcloud services enable {service}.googleapis.com --project={project}"


def any_wrong(findings: Sequence[Finding]) -> bool:
    return any(one.state is State.WRONG for one in findings)
