"""What a gang did while no driver watched it, from what it wrote into the bucket itself. Pure.

A driver that is killed while its gang trains on, and a slice that is lost before the next driver comes: the gang's own
records then say where those hours went.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu.runs.event_log import RunEvent
from tpu.runs.goodput import waste_begins


def is_unwatched(event: RunEvent) -> bool:
    """Whether this is the end of an attempt of which no driver heard."""
    detail = event.detail
    return (
        event.kind == "attempt-ended"
        and detail["attempt"] is not None
        and not detail["phases"]
        and detail.get("reached", 0) is None
    )


def filled_in(events: Sequence[RunEvent], records: Iterable[tuple[int, Mapping[str, Any]]]) -> list[RunEvent]:
    """The history, with the ends of unwatched attempts told by their own records (attempt, record), if any."""
    wanted = {event.detail["attempt"] for event in events if is_unwatched(event)}
    own: dict[int, list[Mapping[str, Any]]] = {}
    for attempt, record in records:
        if attempt in wanted and isinstance(record.get("t"), int | float):
            own.setdefault(attempt, []).append(record)
    started = {e.detail["attempt"]: e for e in events if e.kind == "attempt-started"}
    return [
        _told(event, started.get(event.detail["attempt"]), own[event.detail["attempt"]])
        if is_unwatched(event) and event.detail["attempt"] in own
        else event
        for event in events
    ]


def _told(event: RunEvent, started: RunEvent | None, records: list[Mapping[str, Any]]) -> RunEvent:
    first, last = (pick(record["t"] for record in records) for pick in (min, max))
    # The host's clock may differ from the flow's: what it did lies between the start and the end that the flow knows.
    shift = max(0.0, started.time - first) if started is not None else 0.0
    shift = shift or min(0.0, event.time - last)
    phases: list[tuple[float, str]] = []
    steps: list[tuple[float, int]] = []
    commits: list[tuple[float, int]] = []
    for record in sorted(records, key=lambda one: one["t"]):
        at = min(record["t"] + shift, event.time)
        match record.get("event", "step"):
            case "phase":
                phases.append((at, record["phase"]))
            case "commit":
                commits.append((at, record["step"]))
            case "step" if "step" in record:
                steps.append((at, record["step"]))
    ended = min(last + shift, event.time)
    begin = (started.detail.get("resume") or 0) if started is not None else 0
    committed = event.detail["last_commit"]
    told = {
        "phases": phases,
        "commits": commits,
        "ended": ended,
        "reached": steps[-1][1] if steps else begin,
        "waste_from": waste_begins(steps, begin if committed is None else committed),
    }
    return replace(event, detail=event.detail | told)
