"""What became of a trial, as its run's folder in the bucket tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Fence, load_fence
from tpu.runs.evaluation import load_evaluation
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.figures import is_mixed
from tpu.runs.ledger import make_sum
from tpu.runs.overview import reached
from tpu.runs.record import RunNotFound, load_record
from tpu.runs.report import attempts_of
from tpu.runtime.metrics import read_logged, read_metrics
from tpu.sweeps.curve import thinned
from tpu.sweeps.figures import flat_figures
from tpu.sweeps.metric import Metric, drawn_by_step
from tpu.sweeps.trial import MalformedTrial
from tpu.sweeps.usage import Use, uses_of

State = Literal["finished", "pruned", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """`value` is the metric's, `logged` what the program logs. US dollars; None if no price is known.

    `reports` are the steps (of a program without checkpoints of ours: how many values) and the metric's values by
    which it was judged on its way. `code` are the hashes of the code that its attempts had; `mixed` says which parts of
    it were computed with something else than others. `ended` is seconds since 1970; `curve` is what is drawn by
    step, in few points, `uses` are the chips that the trial had, `figures` those of its last checkpoint's evaluation.
    """

    state: State
    value: float | None = None
    logged: tuple[str, ...] = ()
    step: int = 0
    attempts: int = 0
    seconds: float = 0.0
    dollars: float | None = None
    parameters_sha256: str | None = None
    slices: tuple[str, ...] = ()
    reports: tuple[tuple[int, float], ...] = ()
    code: tuple[str, ...] = ()
    mixed: str = ""
    reason: str = ""
    ended: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    uses: tuple[Use, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Outcome:
        try:
            values = json.loads(data)
            pairs = {
                name: tuple((step, value) for step, value in values.get(name, ()))
                for name in ("reports", "curve")
            }
            uses = tuple(_use(one) for one in values.get("uses", ()))
            return cls(
                **values
                | {name: tuple(values[name]) for name in ("logged", "slices", "code")}
                | pairs
                | {"uses": uses}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedTrial(
                f"the outcome of a trial cannot be understood ({error!r}): {data[:200]!r}"
            ) from error


def _use(values: Mapping[str, Any]) -> Use:
    trained = tuple((start, end) for start, end in values["trained"])
    return Use(**{**values, "chips": tuple(values["chips"]), "trained": trained})


def read_outcome(run_dir: str, metric: Metric, state: State, reason: str, now: float) -> Outcome:
    """The outcome of a trial that has just ended in `state`."""
    try:
        record = load_record(run_dir)
    except RunNotFound:  # it did not come so far
        return Outcome(state, reason=reason, ended=now)
    fence, events = load_fence(run_dir), load_events(run_dir)
    rows = read_metrics(run_dir, fence) if record.config.commits else read_logged(run_dir)
    newest = fence.newest()
    prefix = "params/" if record.config.training else ""
    attempts = attempts_of(events)
    answer = load_evaluation(run_dir, newest.step) if newest else None
    figures = flat_figures(answer or {})
    if newest is not None and metric.figure in figures:
        rows = [*rows, {"step": newest.step, metric.name: figures[metric.figure]}]
    return Outcome(
        state=state,
        value=_value(rows, metric),
        logged=tuple(sorted({name for row in rows for name in row if name not in ("step", "attempt", "t")})),
        step=reached(record, fence, events),
        attempts=len(attempts),
        seconds=now - record.created,
        dollars=_dollars(events, now),
        parameters_sha256=run_digest(run_dir, newest.step, prefix) if newest else None,
        slices=tuple(dict.fromkeys(one["slice"] for one in attempts)),
        code=tuple(dict.fromkeys(one["code"] for one in attempts if "code" in one)),
        mixed=_mixed(run_dir, fence, attempts, record.config.commits),
        reason=reason,
        ended=now,
        curve=thinned(_curve(rows, drawn_by_step(metric.name))),
        uses=uses_of(events, now),
        figures=figures,
    )


def _mixed(run_dir: str, fence: Fence, attempts: Sequence[Mapping[str, Any]], commits: bool) -> str:
    """Chips or library versions, by the checkpoints' own word; code, if attempts that got somewhere had several."""
    counted = [one for one in attempts if not commits or fence.last_of(one["attempt"]) is not None]
    parts = ["chips or library versions"] if is_mixed(run_dir, fence.newest()) else []
    parts += ["code"] if len({one["code"] for one in counted if "code" in one}) > 1 else []
    return " and ".join(parts)


def _dollars(events: Sequence[RunEvent], now: float) -> float | None:
    return make_sum(events, now).dollars


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """What was logged by this name, by step."""
    found = [(row["step"], row.get(name)) for row in rows]
    return [
        (step, float(one))
        for step, one in found
        if isinstance(one, int | float) and not isinstance(one, bool)
    ]


def _value(rows: Sequence[Mapping[str, Any]], metric: Metric) -> float | None:
    numbers = [value for _, value in _curve(rows, metric.name)]
    value = metric.of(numbers) if numbers else math.nan
    return value if math.isfinite(value) else None
