"""The report of a run over several slices, joined from the histories of its slices' parts. Pure.

A second of the run is one of each of its slices: the buckets are their mean, so they sum to the wall time still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu.runs.event_log import RunEvent
from tpu.runs.goodput import BUCKETS, Bucket, partition, run_intervals
from tpu.runs.ledger import Ledger, make_ledger
from tpu.runs.parts import slice_name
from tpu.runs.report import Report, attempts_of, segment_rows
from tpu.runs.timeline import Timeline, make_timeline


def with_parts(report: Report, histories: Sequence[Sequence[RunEvent]], committed: int, now: float) -> Report:
    """The report of the run with what its parts (by number) did. `committed` is its last step that counts."""
    record, begin = report.record, report.timeline.start
    attempts = _attempts(histories)
    ledgers = [make_ledger(events, record.segments, now) for events in histories]
    return replace(
        report,
        segments=segment_rows(record.segments, attempts, committed, record.first_step),
        seconds=_mean([partition(run_intervals(events), begin, now) for events in histories]),
        attempts=attempts,
        ledger=_joined(ledgers),
        timeline=_side_by_side([make_timeline(events, now) for events in histories], begin, now),
    )


def _attempts(histories: Sequence[Sequence[RunEvent]]) -> tuple[Mapping[str, Any], ...]:
    """Those of all slices, by their end; `slice1.2` is the second one of slice 1. Steps that it shared count as its."""
    found = [
        {**one, "attempt": f"{slice_name(number)}.{one['attempt']}", "last_commit": one["reached"]}
        for number, events in enumerate(histories)
        for one in attempts_of(events)
    ]
    return tuple(sorted(found, key=lambda one: one["ended"]))


def _mean(parts: Sequence[Mapping[Bucket, float]]) -> dict[Bucket, float]:
    return {bucket: sum(part[bucket] for part in parts) / len(parts) for bucket in BUCKETS}


def _joined(ledgers: Sequence[Ledger]) -> Ledger:
    egress: dict[str, float] = {}
    for ledger in ledgers:
        for what, dollars in ledger.egress.items():
            egress[what] = egress.get(what, 0.0) + dollars
    return Ledger(
        tuple(one for ledger in ledgers for one in ledger.holdings),
        tuple(one for ledger in ledgers for one in ledger.charges),
        egress,
    )


def _side_by_side(timelines: Sequence[Timeline], begin: float, now: float) -> Timeline:
    bars = sorted((bar for one in timelines for bar in one.bars), key=lambda bar: bar.start)
    return Timeline(begin, max(begin, now), tuple(bars))
