"""A run in a few lines for a terminal."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence

from tpu.checkpoint.fence import load_fence
from tpu.money import in_dollars
from tpu.runs.config import Elastic
from tpu.runs.controller import observe
from tpu.runs.event_log import RunEvent, candidate_in, load_events
from tpu.runs.ledger import Ledger, make_sum
from tpu.runs.overview import reached, state_of
from tpu.runs.parts import part_names
from tpu.runs.record import RunRecord, load_record
from tpu.runs.report import cost_text
from tpu.runs.waiting_board import load_waiting
from tpu.slices import zone_health
from tpu.slices.zone_health import Closed, Fine, Paused, Slowed, ZoneHealth

_SHOWN = (
    "slice-ready", "slice-leased", "slice-deleted", "slice-released", "provision-failed", "attempt-started",
    "attempt-ended", "max-cost-reached", "no-slice", "slice-blamed", "slice-avoided", "repair-wait-started",
)  # fmt: skip


def describe_run(run_dir: str) -> list[str]:
    """Configuration, history and checkpoints of a run.

    Raises:
        tpu.runs.record.RunNotFound: there is no such run.
    """
    record, fence, seen = load_record(run_dir), load_fence(run_dir), observe(run_dir)
    events = load_events(run_dir)
    state = state_of(run_dir, record, fence, seen[0] if seen else None, events)
    ledger = make_sum(events, time.time())
    held = ", ".join(f"{one.slice} ({one.candidate})" for one in ledger.holdings if one.open)
    commits = ", ".join(f"{c.step} (attempt {c.attempt})" for c in fence.commits) or "none"
    return [
        f"{record.config.name}: {state}",
        *(f"{name:14} {value}" for name, value in _facts(record)),
        f"{'cost':14} {cost_text(ledger, record.config.max_cost)}",
        *([f"{'holds':14} {held}{_rate(ledger)}"] if held else []),
        *([f"{'checkpoints':14} {commits}"] if record.config.commits else []),
        *event_lines(events, record.config.commits),
    ]


def status_of(run_dir: str) -> list[str]:
    """How a run is now, in a line or two: its state, how far it is, and what it has or waits for.

    Raises:
        tpu.runs.record.RunNotFound: there is no such run.
    """
    record, fence, seen = load_record(run_dir), load_fence(run_dir), observe(run_dir)
    events, waiting = load_events(run_dir), load_waiting(run_dir)
    state = state_of(run_dir, record, fence, seen[0] if seen else None, events)
    far = f"; step {reached(record, fence, events)} of {record.config.steps}" if record.config.commits else ""
    ledger = make_sum(events, time.time())
    limit = f" of {in_dollars(record.config.max_cost)}" if record.config.max_cost else ""
    spent = f"; {in_dollars(ledger.dollars)}{limit} spent" if ledger.dollars else ""
    lines = [f"{record.config.name}: {state}{far}{spent}"]
    if waiting is not None and state.startswith("driven"):
        ago = max(0.0, time.time() - waiting.time)
        lines += [f"waits for a slice (as of {ago:.0f} s ago):", *(f"  {line}" for line in waiting.lines)]
    else:
        held = [f"{one.slice} ({one.candidate})" for one in ledger.holdings if one.open]
        lines += [f"holds {', '.join(held)}{_rate(ledger)}"] if held else []
    return lines


def zone_lines(health: ZoneHealth, now: float) -> list[str]:
    """How each place that something is known of has served, and whether it is asked now."""
    lines = []
    for (zone, kind, provisioning), known in sorted(health.places.items()):
        match zone_health.permission(known, now):
            case Fine():
                found = "asked as usual"
            case Slowed(wait_s, why):
                found = f"asked slower, again in {wait_s:.0f} s: {why}"
            case Paused(until, why):
                found = f"not asked before {_clock(until)}: {why}"
            case Closed(quota):
                found = (
                    f"never asked, the project has none of the quota '{quota}' (relay zones --forget {zone})"
                )
        lines.append(f"{provisioning} {kind} in {zone}: {found}; {zone_health.summary(known, now)}")
    return lines


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%H:%M:%S")


def _rate(ledger: Ledger) -> str:
    known = all(one.price_an_hour is not None for one in ledger.holdings if one.open)
    return f", {in_dollars(ledger.dollars_an_hour)} an hour" if known else ""


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    config = record.config
    program = (
        " ".join(config.command or ())
        or f"the built-in {config.training and config.training.workload.kind} training"
    )
    yield "program", f"{program}, {config.steps} steps" if config.commits else program
    yield "slice", ", else ".join(map(str, config.slice.choices))
    if parts := part_names(config):
        units = (config.elastic or Elastic()).units
        yield "slices", f"{config.slices}, mode {config.mode}, {units} work units a step: {', '.join(parts)}"
    if record.part_of:
        yield "part of", record.part_of
    yield "configuration", f"sha256 {record.hash[:16]}…"
    yield "code", f"{record.code['source']}, sha256 {record.code['sha256'][:16]}…"
    if record.members:
        yield "trains", f"{', '.join(record.members)} (a run each) in one program"
    if record.parent:
        yield "forked from", f"{record.parent['run']} at step {record.parent['step']}"
    for before, after in record.extensions:
        yield "extended", f"from {before} to {after} steps"


def event_lines(events: Sequence[RunEvent], commits: bool) -> list[str]:
    """What happened, a line each. Tries in a row to get a slice are one line a candidate: there may be hundreds."""
    had = {e.detail["slice"] for e in events if e.kind in ("slice-ready", "slice-leased")}
    never = {e.detail["slice"] for e in events if e.kind == "provision-failed"} - had
    asked = {e.detail["slice"]: str(candidate_in(e.detail)) for e in events if e.kind == "slice-intended"}
    lines: list[str] = []
    tries: dict[str, list[RunEvent]] = {}
    for event in events:
        name = event.detail.get("slice")
        if event.kind not in _SHOWN or (event.kind == "slice-deleted" and name in never):
            continue
        if event.kind == "provision-failed" and name in never:
            tries.setdefault(asked.get(name, f"slice {name}"), []).append(event)
            continue
        lines += [*_tries(tries), _event(event, commits)]
        tries = {}
    return [*lines, *_tries(tries)]


def _tries(tries: Mapping[str, Sequence[RunEvent]]) -> Iterator[str]:
    for candidate, failed in tries.items():
        last = failed[-1]
        reason = last.detail["reason"].splitlines()[0]
        if len(failed) > 1:
            reason = f"{len(failed)} tries since {_at(failed[0])}; the last one: {reason}"
        yield f"{_at(last)} {candidate} was not had: {reason}"


def _at(event: RunEvent) -> str:
    return datetime.datetime.fromtimestamp(event.time).strftime("%m-%d %H:%M:%S")


def _event(event: RunEvent, commits: bool) -> str:
    detail = event.detail
    match event.kind:
        case "attempt-started":
            begin = f" from step {detail['resume'] or 0}" if commits else ""
            told = f"attempt {detail['attempt']} starts{begin} on {detail['slice']}"
            if "pack" in detail:
                told += f", in lane {detail['lane']} of {detail['pack']}"
        case "attempt-ended":
            name = f"attempt {detail['attempt']}" if detail["attempt"] is not None else "preparation"
            last = detail["last_commit"]
            told = f"{name} ended: {detail['verdict']}, {detail['reason']}"
            told += f"; last commit step {last}" if last is not None else ""
        case "provision-failed":
            told = f"slice {detail['slice']} was not had: {detail['reason']}"
        case "no-slice":
            told = f"no slice: {detail['reason']}"
        case "slice-leased":
            told = f"slice {detail['slice']} is taken from the pool"
        case "slice-released":
            told = f"slice {detail['slice']} is given back: {detail['why']}"
        case "max-cost-reached":
            told = f"max_cost of {in_dollars(detail['max_cost'])} is reached"
        case "slice-blamed":
            told = f"slice {detail['slice']} is to blame, and quarantined: {detail['why']}"
        case "slice-avoided":
            told = f"slice {detail['slice']} is left: {detail['why']}"
        case "repair-wait-started":
            told = f"slice {detail['slice']} is being repaired, and waited for"
        case "slice-deleted":
            told = f"slice {detail['slice']} is deleted: {detail['why']}"
        case _:
            told = f"slice {detail['slice']} is ready"
    return f"{_at(event)} {told.splitlines()[0]}"
