"""Where every second of a run went: each in exactly one bucket, and the buckets sum to the wall time.

Goodput is productive step time over wall time, as the ML Goodput literature of Google defines it; steps that were
done again after a preemption count as wasted, not as productive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

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


def partition(intervals: Iterable[Interval], start: float, end: float) -> dict[Bucket, float]:
    """Seconds in each bucket between `start` and `end`; what nothing claims is `other`. They sum to end − start."""
    changes: dict[float, list[tuple[Bucket, int]]] = {start: [], end: []}
    for interval in intervals:
        a, b = (min(max(t, start), end) for t in (interval.start, interval.end))
        if a < b:
            changes.setdefault(a, []).append((interval.bucket, 1))
            changes.setdefault(b, []).append((interval.bucket, -1))
    active: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
    seconds: dict[Bucket, float] = dict.fromkeys(BUCKETS, 0.0)
    for left, right in pairwise(sorted(changes)):
        for bucket, change in changes[left]:
            active[bucket] += change
        for bucket in BUCKETS:
            if active[bucket]:
                seconds[bucket] += right - left
                break
        else:
            seconds["other"] += right - left
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


def waste_begins(steps: Sequence[tuple[float, int]], committed: int, end: float) -> float | None:
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


def run_intervals(events: Sequence[RunEvent]) -> list[Interval]:
    """All that is known of a run's seconds, from its events."""
    intervals: list[Interval] = []
    open_at: dict[str, float] = {}
    for event in events:
        match event.kind:
            case "provision-started" | "sync-started" | "evaluation-wait-started":
                open_at[event.kind] = event.time
            case "slice-ready" | "provision-failed":
                _close(intervals, open_at, "provision-started", "provisioning", event.time)
            case "sync-done":
                _close(intervals, open_at, "sync-started", "sync", event.time)
            case "evaluation-wait-done":
                _close(intervals, open_at, "evaluation-wait-started", "evaluation wait", event.time)
            case "attempt-started":
                open_at["attempt"] = event.time
            case "attempt-ended":
                detail: dict[str, Any] = event.detail
                phases = [(t, p) for t, p in detail["phases"]]
                # From the command that starts the gang to the program's first sign.
                begin = open_at.pop("attempt", event.time)
                intervals.append(Interval("start", begin, phases[0][0] if phases else event.time))
                intervals += attempt_intervals(phases, detail["ended"], detail["waste_from"])
    return intervals


def _close(
    intervals: list[Interval], open_at: dict[str, float], key: str, bucket: Bucket, end: float
) -> None:
    if (begin := open_at.pop(key, None)) is not None:
        intervals.append(Interval(bucket, begin, end))
