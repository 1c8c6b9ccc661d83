"""Gather a report's figures from the bucket, and put the report there."""

from __future__ import annotations

from collections.abc import Sequence

from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.runs.evaluation import load_evaluation
from tpu.runs.event_log import RunEvent
from tpu.runs.record import RunRecord
from tpu.runs.report import Report, graphs_told, make_report
from tpu.runtime.metrics import read_events, read_metrics


def collect(
    record: RunRecord, run_dir: str, events: Sequence[RunEvent], failure: str | None, now: float
) -> Report:
    """The report of a run as it stands in the bucket."""
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
    mixed = False
    graphs = graphs_told(read_events(run_dir)) if record.config.framework == "xla" else None
    return make_report(record, events, committed, digest, evaluations, losses, failure, now, mixed, graphs)


def save_report(run_dir: str, markdown: str, picture: bytes | None) -> None:
    """Write `report/report.md` and `report/loss.png`; a later report replaces them."""
    files.write(f"{run_dir}/report/report.md", markdown.encode())
    if picture:
        files.write(f"{run_dir}/report/loss.png", picture)
