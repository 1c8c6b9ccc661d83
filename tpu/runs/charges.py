"""Which budget each attempt of a run is charged to, and whether its slice is to blame. Pure, from the history."""

from __future__ import annotations

from collections.abc import Sequence

from tpu.runs.event_log import RunEvent
from tpu.runs.record import RunRecord
from tpu.slices.blame import Suspicion, Tried, as_charged, blamed, suspect
from tpu.slices.log_clues import is_mistake
from tpu.slices.verdict import VerdictKind


def charged(record: RunRecord, events: Sequence[RunEvent]) -> list[VerdictKind]:
    """Verdicts of all attempts in order, as budgets count them: see tpu.slices.blame."""
    return as_charged(_tried(record, events))


def suspected(record: RunRecord, events: Sequence[RunEvent]) -> Suspicion | None:
    """Why the slice of the last attempt is not to be used again by the run; None if nothing speaks against it."""
    return suspect(_tried(record, events), record.config.budget.user_failure)


def newly_blamed(record: RunRecord, events: Sequence[RunEvent]) -> list[str]:
    """Slices that are to blame for failures of the run, and are not noted as such in its history yet."""
    noted = {event.detail["slice"] for event in events if event.kind == "slice-blamed"}
    return [name for name in blamed(_tried(record, events)) if name not in noted]


def _tried(record: RunRecord, events: Sequence[RunEvent]) -> list[Tried]:
    # Who made room for a more important run has nothing to be charged for, nor has its slice.
    # A foreign command does not say how far it is, and an attempt without a gang got nowhere by the slice's fault.
    says = record.config.commits
    return [
        Tried(
            event.detail["slice"],
            VerdictKind(event.detail["verdict"]),
            event.detail.get("reached") if says and event.detail["attempt"] is not None else None,
            event.detail.get("resume") or 0,
            is_mistake(event.detail["reason"]),
        )
        for event in events
        if event.kind == "attempt-ended" and not event.detail.get("evicted")
    ]
