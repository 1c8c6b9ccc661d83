"""Gather a report's figures from the bucket, and put the report there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tpu.checkpoint import files, objects
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Commit, load_fence
from tpu.checkpoint.restore import Damaged, read_manifest
from tpu.runs.evaluation import load_evaluation
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.links import file_links
from tpu.runs.parts import part_names
from tpu.runs.record import RunRecord, bucket_of, run_directory
from tpu.runs.report import Report, draw, graphs_told, make_report, to_markdown
from tpu.runs.report_of_parts import with_parts
from tpu.runs.unwatched import filled_in, is_unwatched
from tpu.runtime.metrics import read_events, read_metrics, read_records


def collect(
    record: RunRecord, run_dir: str, events: Sequence[RunEvent], failure: str | None, now: float
) -> Report:
    """The report of a run as it stands in the bucket."""
    if any(map(is_unwatched, events)):
        events = filled_in(events, read_records(run_dir))
    fence = load_fence(run_dir)
    newest = fence.newest()
    # A program of the user's own names its arrays as it likes, so all of them are hashed.
    prefix = "params/" if record.config.training else ""
    digest = run_digest(run_dir, newest.step, prefix) if newest else None
    evaluations = {
        commit.step: found
        for commit in fence.commits
        if (found := load_evaluation(run_dir, commit.step)) is not None
    }
    losses = [
        (step, float(loss))
        for row in read_metrics(run_dir, fence)
        if isinstance(step := row["step"], int) and isinstance(loss := row.get("loss"), int | float)
    ]
    committed = newest.step if newest else 0
    if not record.config.commits and failure is None:
        committed = record.config.steps
    mixed = is_mixed(run_dir, newest)
    graphs = graphs_told(read_events(run_dir)) if record.config.framework == "xla" else None
    report = make_report(record, events, committed, digest, evaluations, losses, failure, now, mixed, graphs)
    if not (parts := part_names(record.config)):
        return report
    histories = [load_events(run_directory(bucket_of(run_dir), name)) for name in parts]
    return with_parts(report, histories, committed, now)


def is_mixed(run_dir: str, newest: Commit | None) -> bool:
    """Whether a part of the run was computed where other bits come out: checkpoints hand this on."""
    if newest is None:
        return False
    try:
        return read_manifest(run_dir, newest).mixed
    except Damaged:
        return False  # nobody can tell


def save_report(run_dir: str, report: Report) -> dict[str, bytes]:
    """Write `report/report.md`, its pictures beside it, and `report/figures.json`; a later report replaces them.

    Returns the pictures as PNG, by name.
    """
    pictures = draw(report)
    for name, picture in pictures.items():
        files.write(f"{run_dir}/report/{name}.png", picture)
    text = to_markdown(
        report, {name: f"{name}.png" for name in pictures}, file_links(run_dir, objects.local_server())
    )
    files.write(f"{run_dir}/report/report.md", text.encode())
    files.write(f"{run_dir}/report/figures.json", json.dumps(figures_of(report), indent=1).encode())
    return pictures


def figures_of(report: Report) -> dict[str, Any]:
    """What a program wants of a report. Seconds, and US dollars (None: no price is known)."""
    return {
        "run": report.record.config.name,
        "verdict": report.verdict,
        "parameters_sha256": report.parameters_sha256,
        "attempts": len(report.attempts),
        # Of a foreign command neither steps nor checkpoints are known, so there is no goodput to tell.
        "goodput": report.goodput if report.record.config.commits else None,
        "wall_s": report.wall_s,
        "seconds": dict(report.seconds),
        "dollars": report.ledger.dollars,
        "unpriced_s": report.ledger.unpriced_s,
        "evaluation": report.evaluations[max(report.evaluations)] if report.evaluations else None,
    }


def saved_dollars(run_dir: str) -> float | None:
    """What a run had cost when its report was written; None if there is none, or no price is known."""
    found = objects.read(f"{run_dir}/report/figures.json")
    return json.loads(found[0])["dollars"] if found else None
