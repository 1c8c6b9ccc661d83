"""What `relay sweep show` prints of a sweep: a line a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu.sweeps.board import told
from tpu.sweeps.steering import Steered, who_hears
from tpu.sweeps.trial import Trial


def sweep_lines(sweep: Steered) -> list[str]:
    """Of trials that run it is known what the sweep's own table said last."""
    rows = {row["trial"]: row for row in sweep.book.results()}
    outcomes, metric = sweep.book.outcomes(), sweep.search.metric.name
    lines = []
    for trial in sweep.book.trials():
        row = rows.get(trial.number, {})
        if (outcome := outcomes.get(trial.number)) is not None:
            row = {
                "state": outcome.state,
                "step": outcome.step,
                metric: outcome.value,
                "reason": outcome.reason,
            }
        lines.append(_line(trial, row, metric))
    return [*lines, f"{len(lines)} trials have begun; {who_hears(sweep)}"]


def _line(trial: Trial, row: Mapping[str, Any], metric: str) -> str:
    value = row.get(metric)
    shown = f"{metric} {value:.6g}" if isinstance(value, int | float) else f"no {metric} yet"
    why = f"  {str(row['reason']).splitlines()[0]}" if row.get("reason") else ""
    state, step = row.get("state", "waiting"), row.get("step", 0)
    what = told(trial.parameters, trial.seed) + ("" if trial.pack is None else f", pack {trial.pack}")
    return f"{trial.number:>5}  {trial.run}  {state:8}  step {step:>7}  {shown}  ({what}){why}"
