"""What others are told of a run while it goes on: events with fixed names, made of the run's own history. Pure.

Automations are built on them, so a name or a field of a payload is never given another meaning. Every payload has
`run` (its name), `directory` (where it is in the bucket) and `message` (a sentence for a person); beside these:

tpu.slice.ready            slice, zone, accelerator_type, provisioning, price_an_hour: a new one, or one of the pool
tpu.slice.preempted        slice, attempt, reason, last_commit (a step), preemptions: how many so far
tpu.slice.deleted          slice, reason: the cloud says that it is gone
tpu.slice.released         slice, reason: it was given back to the pool
tpu.run.resumed            attempt, step, slice: another attempt starts from that step
tpu.run.no-capacity        hours, why (a line a candidate): it has been without a slice for so long; once a wait
tpu.run.budget-reached     verdict, reason: preemptions, faults or failures came more often than `budget` allows
tpu.run.max-cost-warned    spent, max_cost: four fifths of it are spent
tpu.run.max-cost-reached   spent, max_cost
tpu.run.finished           attempts, wall_s, goodput, dollars, evaluation
tpu.run.failed             reason
tpu.run.stopped            reason: somebody stopped or cancelled it, or max_cost did; started again it goes on

The resource is the run (`tpu.run.` and its directory); related are its slice (role `slice`) and zone (role `zone`), and
of Prefect's the flow run, flow, deployment, work queue, work pool and tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu.money import in_dollars
from tpu.runs.event_log import RunEvent, candidate_of
from tpu.runs.parting import was_ready
from tpu.slices.verdict import VerdictKind

# Of what programs and clouds say, so much; an event is no place for a log.
LONGEST_TEXT = 1000


@dataclass(frozen=True)
class Announcement:
    """One event. `message` is a sentence without the run's name; `slice` and `zone` are what it concerns beside it."""

    name: str
    message: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    slice: str | None = None
    zone: str | None = None


def newest(events: Sequence[RunEvent]) -> Announcement | None:
    """What the last event of a run's history is announced as; None if it is its own affair."""
    event, detail = events[-1], events[-1].detail
    match event.kind:
        case "slice-ready" | "slice-leased":
            return _ready(events)
        case "attempt-ended" if _preempted(event):
            return _preempted_slice(events)
        case "slice-deleted" if was_ready(events, detail["slice"]):  # of tries there may be hundreds
            return _of_slice(events, "tpu.slice.deleted", f"slice {detail['slice']} is deleted: {detail['why']}",
                             reason=_cut(detail["why"]))  # fmt: skip
        case "slice-released" if was_ready(events, detail["slice"]):
            told = f"slice {detail['slice']} is given back to the pool: {detail['why']}"
            return _of_slice(events, "tpu.slice.released", told, reason=_cut(detail["why"]))
        case "attempt-started" if detail["attempt"] > 1:
            step = detail["resume"] or 0
            return _of_slice(events, "tpu.run.resumed", f"attempt {detail['attempt']} starts from step {step} on "
                             f"{detail['slice']}", attempt=detail["attempt"], step=step)  # fmt: skip
        case "no-capacity":
            why = "; ".join(detail["why"])
            return Announcement("tpu.run.no-capacity", f"no slice for {detail['hours']:g} h{f': {why}' if why else ''}",
                                {"hours": detail["hours"], "why": [_cut(line) for line in detail["why"]]})  # fmt: skip
        case "max-cost-warned" | "max-cost-reached":
            told = f"{in_dollars(detail['spent'])} of max_cost {in_dollars(detail['max_cost'])} spent"
            ends = ": it saves and ends" if event.kind == "max-cost-reached" else ""
            return Announcement(f"tpu.run.{event.kind}", told + ends,
                                {"spent": detail["spent"], "max_cost": detail["max_cost"]})  # fmt: skip
    return None


def budget_reached(verdict: str, reason: str) -> Announcement:
    return Announcement("tpu.run.budget-reached", f"no further attempt: {_cut(reason)}",
                        {"verdict": verdict, "reason": _cut(reason)})  # fmt: skip


def finished(figures: Mapping[str, Any]) -> Announcement:
    """`figures` are those of the report."""
    payload = {name: figures[name] for name in ("attempts", "wall_s", "goodput", "dollars", "evaluation")}
    parts = [f"finished after {figures['wall_s'] / 60:.0f} min and {figures['attempts']} attempt(s)"]
    if figures["goodput"] is not None:
        parts.append(f"goodput {figures['goodput']:.0%}")
    if figures["dollars"] is not None:
        parts.append(in_dollars(figures["dollars"]))
    return Announcement("tpu.run.finished", ", ".join(parts), payload)


def failed(reason: str) -> Announcement:
    return Announcement("tpu.run.failed", f"failed: {_cut(reason)}", {"reason": _cut(reason)})


def stopped(reason: str) -> Announcement:
    return Announcement("tpu.run.stopped", f"stopped: {_cut(reason)}", {"reason": _cut(reason)})


def payload_of(said: Announcement, run: str, directory: str) -> dict[str, Any]:
    """The whole payload of an announcement of a run."""
    return {**said.payload, "run": run, "directory": directory, "message": f"{run}: {_cut(said.message)}"}


def resource_of(run: str, directory: str) -> dict[str, str]:
    """The run as the resource of an event."""
    return {
        "prefect.resource.id": f"tpu.run.{directory.removeprefix('gs://')}",
        "prefect.resource.name": run,
        "tpu.run.directory": directory,
    }


def related_of(said: Announcement) -> list[dict[str, str]]:
    """Slice and zone as related resources."""
    return [
        {"prefect.resource.id": f"tpu.{role}.{name}", "prefect.resource.role": role, "prefect.resource.name": name}
        for role, name in (("slice", said.slice), ("zone", said.zone))
        if name is not None
    ]  # fmt: skip


def _preempted(event: RunEvent) -> bool:
    """A run that makes room for another one is told so by the pool; nobody has lost a slice."""
    return event.detail["verdict"] == VerdictKind.PREEMPTED.value and not event.detail.get("evicted")


def _preempted_slice(events: Sequence[RunEvent]) -> Announcement:
    detail = events[-1].detail
    count = sum(event.kind == "attempt-ended" and _preempted(event) for event in events)
    return _of_slice(
        events, "tpu.slice.preempted", f"preemption {count}: {detail['slice']}, {detail['reason']}",
        attempt=detail["attempt"], reason=_cut(detail["reason"]), last_commit=detail["last_commit"], preemptions=count,
    )  # fmt: skip


def _ready(events: Sequence[RunEvent]) -> Announcement:
    name = events[-1].detail["slice"]
    candidate = candidate_of(events, name)
    return _of_slice(
        events, "tpu.slice.ready", f"slice {name} is ready: {candidate}", zone=candidate.zone,
        accelerator_type=candidate.accelerator_type, provisioning=candidate.provisioning,
        price_an_hour=candidate.price_an_hour,
    )  # fmt: skip


def _of_slice(events: Sequence[RunEvent], name: str, message: str, **payload: Any) -> Announcement:
    slice_name = events[-1].detail["slice"]
    zone = candidate_of(events, slice_name).zone
    return Announcement(name, message, {"slice": slice_name} | payload, slice_name, zone)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
