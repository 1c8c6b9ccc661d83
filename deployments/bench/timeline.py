"""From the events of a run to the seconds of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tpu.runs.event_log import RunEvent
from tpu.runtime.metrics import read_records

Event = dict[str, Any]


def trainer_events(run_dir: str, attempt: int) -> list[Event]:
    """What a trainer said, from the bucket, in the order of time; there its steps carry no `event`."""
    records: list[Event] = [
        record if "event" in record else {"event": "step", **record}
        for number, record in read_records(run_dir)
        if number == attempt
    ]
    return sorted(records, key=lambda record: record["t"])


def phase_seconds(events: Sequence[Event], end: float) -> dict[str, float]:
    """Seconds of a trainer in each of its phases up to `end`, by its own events (`t`, `event`, `phase`)."""
    phases = [(event["t"], event["phase"]) for event in events if event["event"] == "phase"]
    seconds: dict[str, float] = {}
    for (begin, phase), (until, _) in pairwise([*phases, (end, "")]):
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, min(until, end) - begin)
    return seconds


def border_seconds(events: Sequence[Event]) -> list[float]:
    """How long the trainer stood still at each border but the last, at which it waits for the commit."""
    phases = [(event["t"], event["phase"]) for event in events if event["event"] == "phase"]
    return [after - at for (at, phase), (after, _) in pairwise(phases) if phase == "save"][:-1]


def start_parts(began: float, events: Sequence[Event]) -> dict[str, float]:
    """Seconds from `began` to the first new step of a trainer, in parts.

    `launch` is all up to the program's own first sign, `start` its imports and the making of its state.
    """
    first = next(event["t"] for event in events if event["event"] == "step")
    seconds = phase_seconds(events, first)
    return {
        "launch": events[0]["t"] - began,
        "start": seconds.get("start", 0.0),
        "restore": seconds.get("restore", 0.0),
        "compile": seconds.get("compile", 0.0),
        "first step": seconds.get("step", 0.0),
    }


def recovery_parts(killed: float, run: Iterable[RunEvent], trainer: Sequence[Event]) -> dict[str, float]:
    """Seconds from a host's death to the first new step, in parts that sum to it.

    `run` are the run's own events, `trainer` those of the second attempt's trainer. `delete` is closing the attempt and
    deleting the lost slice, `provision` the task's retry and the creation of the next one, `launch` includes
    opening the attempt.
    """
    at: dict[str, float] = {}
    for event in run:
        if event.time < killed:
            continue
        if event.kind == "attempt-ended":
            at.setdefault("verdict", event.detail["ended"])
        at.setdefault(event.kind, event.time)
    parts = {
        "detect": at["verdict"] - killed,
        "delete": at["slice-deleted"] - at["verdict"],
        "provision": at["sync-started"] - at["slice-deleted"],
        "sync": at["sync-done"] - at["sync-started"],
    }
    return parts | start_parts(at["sync-done"], trainer)
