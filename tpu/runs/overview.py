"""What the bucket knows of its runs, at a glance: how far each is, and whether somebody drives it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tpu.checkpoint import objects
from tpu.checkpoint.fence import Fence, MalformedFence, load_fence
from tpu.runs.controller import ControllerState, MalformedController, observe
from tpu.runs.event_log import MalformedEvent, RunEvent, load_events
from tpu.runs.record import MalformedRecord, RunNotFound, RunRecord, load_record, run_directory
from tpu.slices.verdict import VerdictKind

READERS = 16


@dataclass(frozen=True)
class RunLine:
    """One run in a list. `created` is in seconds since 1970."""

    name: str
    step: int
    steps: int
    state: str
    created: float
    parent: str


def list_runs(bucket: str) -> list[RunLine]:
    """All runs of a bucket by name; a folder without a record is none."""
    names = objects.folders(f"{bucket}/runs")
    with ThreadPoolExecutor(READERS) as readers:
        lines = readers.map(lambda name: _readable_line(run_directory(bucket, name), name), names)
        return [line for line in lines if line is not None]


def _readable_line(run_dir: str, name: str) -> RunLine | None:
    """A run whose files are damaged must not hide all the others."""
    try:
        return _line(run_dir, name)
    except (MalformedRecord, MalformedFence, MalformedController, MalformedEvent) as error:
        return RunLine(name, 0, 0, f"damaged: {str(error).partition(' (')[0]}", 0.0, "")


def _line(run_dir: str, name: str) -> RunLine | None:
    try:
        record = load_record(run_dir)
    except RunNotFound:
        return None
    fence, seen = load_fence(run_dir), observe(run_dir)
    # Only a foreign command's end stands nowhere but in the events.
    events = [] if record.config.commits else load_events(run_dir)
    parent = f"{record.parent['run']}@{record.parent['step']}" if record.parent else ""
    state = run_state(record, fence, seen[0] if seen else None, events)
    return RunLine(name, reached(record, fence, events), record.config.steps, state, record.created, parent)


def reached(record: RunRecord, fence: Fence, events: Sequence[RunEvent]) -> int:
    """The step that counts: of the newest commit; of a foreign command, its last if it has ended well."""
    if not record.config.commits:
        return record.config.steps if ended_well(record, events) else 0
    newest = fence.newest()
    return newest.step if newest else record.first_step


def ended_well(record: RunRecord, events: Sequence[RunEvent]) -> bool:
    return any(
        event.kind == "attempt-ended"
        and event.detail["verdict"] == VerdictKind.FINISHED.value
        and event.detail["steps"] == record.config.steps
        for event in events
    )


def run_state(
    record: RunRecord, fence: Fence, controller: ControllerState | None, events: Sequence[RunEvent]
) -> str:
    """One word, and who: `driven` says that a process acts for the run, as far as can be told from here."""
    if controller is not None and not controller.released and not controller.owner.known_dead():
        return f"driven by process {controller.owner.pid} on {controller.owner.host}"
    if reached(record, fence, events) >= record.config.steps:
        return "finished"
    if controller is None:
        return "not started"
    if fence.open:
        return "left: its driver died, a gang may still train"
    return "stopped"
