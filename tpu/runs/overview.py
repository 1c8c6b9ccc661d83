"""What the bucket knows of its runs, at a glance: how far each is, and whether somebody drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from tpu.checkpoint import objects
from tpu.checkpoint.fence import Fence, MalformedFence, load_fence
from tpu.money import in_dollars
from tpu.runs.charges import charged
from tpu.runs.controller import ControllerState, MalformedController, observe
from tpu.runs.event_log import MalformedEvent, RunEvent, load_events
from tpu.runs.figures import saved_dollars
from tpu.runs.ledger import make_sum
from tpu.runs.record import MalformedRecord, RunNotFound, RunRecord, load_record, run_directory
from tpu.runs.stop_request import stop_requested
from tpu.slices.budget import Budgets, Exhausted, allows
from tpu.slices.verdict import VerdictKind

READERS = 16
# A reason may hold the last line of a program; in a list it is cut.
REASON_LENGTH = 120
# Why a slice in creation was given up, if a person wanted so: see SliceHolder.provision.
_GIVEN_UP = ("cancelled", "stopped by request", "SIGTERM")


@dataclass(frozen=True)
class RunLine:
    """One run in a list. `created` is in seconds since 1970; `steps` is None for a foreign command, which has none.

    `dollars` is what its slices have cost so far, None if that is not known.
    """

    name: str
    step: int
    steps: int | None
    state: str
    created: float
    parent: str
    dollars: float | None = None
    part_of: str = ""


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
    # The fence tells how far a run is, but not why it is no further, and nothing of a foreign command's end.
    whole = record.config.commits and reached(record, fence, ()) >= record.config.steps
    events = [] if whole else load_events(run_dir)
    parent = f"{record.parent['run']}@{record.parent['step']}" if record.parent else ""
    state = state_of(run_dir, record, fence, seen[0] if seen else None, events)
    steps = record.config.steps if record.config.commits else None
    dollars = _saved_or_summed(run_dir) if whole else make_sum(events, time.time()).dollars
    return RunLine(
        name, reached(record, fence, events), steps, state, record.created, parent, dollars, record.part_of
    )


def _saved_or_summed(run_dir: str) -> float | None:
    """What a run that is over has cost: its report knows, and many small objects need not be read; a trial has none."""
    saved = saved_dollars(run_dir)
    if saved is None:
        with suppress(MalformedEvent):  # the run is over all the same
            return make_sum(load_events(run_dir), time.time()).dollars
    return saved


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


def state_of(
    run_dir: str,
    record: RunRecord,
    fence: Fence,
    controller: ControllerState | None,
    events: Sequence[RunEvent],
) -> str:
    """`run_state`, with a look whether somebody asked the last driver to stop."""
    asked = controller is not None and stop_requested(run_dir, controller.term)
    return run_state(record, fence, controller, events, asked)


def run_state(
    record: RunRecord,
    fence: Fence,
    controller: ControllerState | None,
    events: Sequence[RunEvent],
    asked: bool = False,
) -> str:
    """One word, and who or why: `driven` says that a process acts for the run, as far as can be told from here.

    `asked` is True if the last driver was asked to stop.
    """
    if controller is not None and controller.drives:
        return f"driven by process {controller.owner.pid} on {controller.owner.host}"
    if reached(record, fence, events) >= record.config.steps:
        return "finished"
    if controller is None:
        return "not started"
    if fence.open:
        return "left: its driver died, a gang may still train"
    last = next((e for e in reversed(events) if e.kind in ("driver-started", "max-cost-reached")), None)
    if last is not None and last.kind == "max-cost-reached":
        return f"stopped: max_cost of {in_dollars(last.detail['max_cost'])} is reached"
    reason = None if asked else failure(record, events)
    return "stopped" if reason is None else f"failed: {reason}"


def failure(record: RunRecord, events: Sequence[RunEvent]) -> str | None:
    """Why the last driver gave up, in one line; None if the history knows of nothing but a stop.

    A preemption or a lost host ends no run that its budget lets go on, so what ended behind one was stopped.
    """
    last = next(
        (e for e in reversed(events) if e.kind in ("attempt-ended", "provision-failed", "no-slice")), None
    )
    if last is None:
        return None
    reason = last.detail["reason"].strip() or "no reason given"
    if last.kind == "no-slice":
        return _short(f"no slice: {reason}")
    if last.kind == "provision-failed":
        return None if reason in _GIVEN_UP else _short(f"no slice: {reason}")
    kinds = charged(record, events)
    if not kinds or last.detail.get("evicted") or kinds[-1] in (VerdictKind.FINISHED, VerdictKind.CANCELLED):
        return None
    budget = record.config.budget
    answer = allows(Budgets(budget.preemption, budget.infrastructure, budget.user_failure), kinds)
    # The next attempt of a failing program would most likely have ended the same way.
    gave_up = isinstance(answer, Exhausted) or kinds[-1] is VerdictKind.USER_FAILURE
    return _short(f"{kinds[-1].value}, {reason}") if gave_up else None


def _short(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= REASON_LENGTH else f"{line[: REASON_LENGTH - 1]}…"
