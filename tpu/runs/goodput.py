"""Where every second of a run went: each in exactly one bucket, and the buckets sum to the wall time.

Goodput is productive step time over wall time, as the ML Goodput literature of Google defines it; steps that were
done again after a preemption count as wasted, not as productive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from tpu.runs.event_log import RunEvent

Bucket = Literal[
    "step",
    "wasted",
    "provisioning",
    "sync",
    "start",
    "restore",
    "compile",
    "save",
    "evaluation wait",
    "idle",
    "other",
]
# In a second that several would claim, the first in this order has it.
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)

_OF_PHASE: dict[str, Bucket] = {
    "start": "start",
    "restore": "restore",
    "compile": "compile",
    "step": "step",
    "save": "save",
    "evaluate": "evaluation wait",
    "idle": "idle",
}


@dataclass(frozen=True)
class Interval:
    """From `start` to `end`, seconds since 1970 on the clock of the flow's machine."""

    bucket: Bucket
    start: float
    end: float


def pieces(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The time from `start` to `end` cut into neighbours of one bucket each; what nothing claims is `other`.

    Times may be of any one unit; with whole numbers nothing is rounded.
    """
    changes: dict[float, list[tuple[Bucket, int]]] = {start: [], end: []}
    for interval in intervals:
        a, b = (min(max(t, start), end) for t in (interval.start, interval.end))
        if a < b:
            changes.setdefault(a, []).append((interval.bucket, 1))
            changes.setdefault(b, []).append((interval.bucket, -1))
    active: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
    found: list[Interval] = []
    for left, right in pairwise(sorted(changes)):
        for one, change in changes[left]:
            active[one] += change
        claims: list[Bucket] = [one for one in BUCKETS if active[one]]
        bucket = claims[0] if claims else "other"
        if found and found[-1].bucket == bucket:
            left = found.pop().start
        found.append(Interval(bucket, left, right))
    return found


def partition(intervals: Iterable[Interval], start: float, end: float) -> dict[Bucket, float]:
    """Seconds in each bucket between `start` and `end`; what nothing claims is `other`. They sum to end − start."""
    seconds: dict[Bucket, float] = dict.fromkeys(BUCKETS, 0.0)
    for piece in pieces(intervals, start, end):
        seconds[piece.bucket] += piece.end - piece.start
    return seconds


def attempt_intervals(
    phases: Sequence[tuple[float, str]], end: float, waste_from: float | None
) -> list[Interval]:
    """Intervals of one attempt: each phase lasts until the next; steps after `waste_from` were done again."""
    intervals = []
    for (begin, phase), (until, _) in pairwise([*phases, (end, "")]):
        bucket = _OF_PHASE.get(phase, "other")
        if bucket == "step" and waste_from is not None and until > waste_from:
            intervals.append(Interval("step", begin, max(begin, waste_from)))
            intervals.append(Interval("wasted", max(begin, waste_from), until))
        else:
            intervals.append(Interval(bucket, begin, until))
    return intervals


def waste_begins(steps: Sequence[tuple[float, int]], committed: int) -> float | None:
    """When an attempt began to do steps that are not in its last commit; None if it did none.

    `steps` are (time, step) as logged, ascending. A commit between two logged steps is placed in proportion.
    """
    previous: tuple[float, int] | None = None
    for time, step in steps:
        if step > committed:
            if previous is None or step == previous[1]:
                return previous[0] if previous else time
            share = max(0.0, (committed - previous[1]) / (step - previous[1]))
            return previous[0] + share * (time - previous[0])
        previous = (time, step)
    return None


# What a run is at from an event of this kind on, until the next one that says something else.
_FROM: dict[str, Bucket] = {
    "slice-wanted": "provisioning",
    "slice-intended": "provisioning",
    "repair-wait-started": "provisioning",
    "repair-wait-done": "other",
    "sync-started": "sync",
    "sync-done": "other",
    "evaluation-wait-started": "evaluation wait",
    "evaluation-wait-done": "other",
}


def run_intervals(events: Sequence[RunEvent]) -> list[Interval]:
    """All that is known of a run's seconds, from its events."""
    history = _History()
    for event in events:
        history.hear(event)
    return history.intervals


class _History:
    """What a run is at between two events: a bucket; `attempt` while a gang lives, whose phases are told at its end; or
    `between` after a loss or a refusal: provisioning if it goes on to another slice, of no bucket if it does not."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._now: Bucket | Literal["attempt", "between"] = "other"
        self._since = 0.0
        self._coming: set[str] = set()  # slices that were asked for and are neither ready nor given up
        self._wanting = False  # whether the run goes on to another one when one is refused
        self._last: float | None = None

    def hear(self, event: RunEvent) -> None:
        kind, at = event.kind, event.time
        match kind:
            case "driver-started" if self._now != "attempt" and not self._coming:
                # Since its last word nobody drove the run. A gang and a creation go on without a driver.
                self._wanting = False
                if self._last is not None:
                    self._turn("other", self._last)
                    self._claim("idle", self._last, at)
                self._since = at
            case "attempt-started":
                self._turn("attempt", at)
            case "attempt-ended":
                if self._now == "attempt":
                    self._claim_attempt(event)
                self._turn("between", at)
            case "back-off":
                self._on_to_another_slice(at)
                self._claim("idle", at, at + event.detail["seconds"])
                self._now, self._since = "between", at + event.detail["seconds"]
            case "slice-leased" if self._now != "attempt":
                # A slice of the pool: whatever went on since the last event was the wait for it.
                self._on_to_another_slice(at)
                if self._now == "other" and self._last is not None:
                    self._claim("provisioning", self._last, at)
                self._wanting = False
                self._turn("other", at)
            case "slice-ready" | "provision-failed" | "slice-deleted" | "slice-released":
                self._coming.discard(event.detail.get("slice", ""))
                if kind == "slice-ready":
                    self._wanting = False
                if self._now == "provisioning" and not self._coming and not self._wanting:
                    self._turn("other" if kind == "slice-ready" else "between", at)
            case _ if kind in _FROM:
                if kind == "slice-intended":
                    self._coming.add(event.detail["slice"])
                self._wanting = self._wanting or kind == "slice-wanted"
                if _FROM[kind] == "provisioning":
                    self._on_to_another_slice(at)
                self._turn(_FROM[kind], at)
        self._last = at

    def _on_to_another_slice(self, at: float) -> None:
        if self._now == "between":
            self._claim("provisioning", self._since, at)
            self._now, self._since = "provisioning", at

    def _turn(self, to: Bucket | Literal["attempt", "between"], at: float) -> None:
        now = self._now
        if now != "attempt" and now != "between" and now != "other":
            self._claim(now, self._since, at)
        self._now, self._since = to, at

    def _claim_attempt(self, event: RunEvent) -> None:
        detail = event.detail
        phases = [(t, p) for t, p in detail["phases"]]
        if not phases and detail.get("reached", 0) is None:
            return  # it ended while nobody watched: what its seconds went to is not known
        # From the command that starts the gang to the program's first sign.
        self._claim("start", self._since, phases[0][0] if phases else event.time)
        self.intervals += attempt_intervals(phases, detail["ended"], detail["waste_from"])

    def _claim(self, bucket: Bucket, start: float, end: float) -> None:
        if start < end:
            self.intervals.append(Interval(bucket, start, end))
