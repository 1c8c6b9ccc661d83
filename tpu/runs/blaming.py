"""What follows from a run's failures for the slices on which it failed: they are left, or nobody uses them any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tpu.runs.charges import newly_blamed, suspected
from tpu.runs.event_log import EventLog, RunEvent
from tpu.runs.record import RunRecord
from tpu.slices.blame import Suspicion


async def weigh(
    record: RunRecord, log: EventLog, quarantine: Callable[[str, str], Awaitable[None]]
) -> Suspicion | None:
    """Look at the attempt that has just been noted. Why its slice is to be left; None if it may be used again.

    A slice that turns out to be to blame is noted and quarantined, also one that the run has left long ago.
    """
    suspicion = suspected(record, log.events)
    for name in newly_blamed(record, log.events):
        why = f"{record.config.name} failed on it, and got further on another slice"
        await log.note("slice-blamed", slice=name, why=why)
        await quarantine(name, why)
    if suspicion is not None and not suspicion.proven:
        name = next(e for e in reversed(log.events) if e.kind == "attempt-ended").detail["slice"]
        await log.note("slice-avoided", slice=name, why=suspicion.why)
    return suspicion


def avoided(events: Sequence[RunEvent]) -> set[str]:
    """Slices on which the run is not to be tried again."""
    return {event.detail["slice"] for event in events if event.kind in ("slice-avoided", "slice-blamed")}
