"""What became of a trial, as its run's folder in the bucket tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Fence, load_fence
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.figures import is_mixed
from tpu.runs.ledger import make_sum
from tpu.runs.overview import reached
from tpu.runs.record import RunNotFound, load_record
from tpu.runs.report import attempts_of
from tpu.runtime.metrics import read_logged, read_metrics
from tpu.sweeps.metric import Metric
from tpu.sweeps.trial import MalformedTrial

State = Literal["finished", "pruned", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """`value` is the metric's, `logged` what the program logs. US dollars; None if no price is known.

    `reports` are the steps (of a program without checkpoints of ours: how many values) and the metric's values by
    which it was judged on its way. `code` are the hashes of the code that its attempts had; `mixed` says which parts of
    it were computed with something else than others.
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

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Outcome:
        try:
            values = json.loads(data)
            reports = tuple((step, value) for step, value in values["reports"])
            return cls(
                **values
                | {name: tuple(values[name]) for name in ("logged", "slices", "code")}
                | {"reports": reports}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedTrial(
                f"the outcome of a trial cannot be understood ({error!r}): {data[:200]!r}"
            ) from error


def read_outcome(run_dir: str, metric: Metric, state: State, reason: str, now: float) -> Outcome:
    """The outcome of a trial that has just ended in `state`."""
    try:
        record = load_record(run_dir)
    except RunNotFound:  # it did not come so far
        return Outcome(state, reason=reason)
    fence, events = load_fence(run_dir), load_events(run_dir)
    rows = read_metrics(run_dir, fence) if record.config.commits else read_logged(run_dir)
    newest = fence.newest()
    prefix = "params/" if record.config.training else ""
    attempts = attempts_of(events)
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
    )


def _mixed(run_dir: str, fence: Fence, attempts: Sequence[Mapping[str, Any]], commits: bool) -> str:
    """Chips or library versions, by the checkpoints' own word; code, if attempts that got somewhere had several."""
    counted = [one for one in attempts if not commits or fence.last_of(one["attempt"]) is not None]
    parts = ["chips or library versions"] if is_mixed(run_dir, fence.newest()) else []
    parts += ["code"] if len({one["code"] for one in counted if "code" in one}) > 1 else []
    return " and ".join(parts)


def _dollars(events: Sequence[RunEvent], now: float) -> float | None:
    return make_sum(events, now).dollars


def _value(rows: Sequence[Mapping[str, Any]], metric: Metric) -> float | None:
    found = [row.get(metric.name) for row in rows]
    numbers = [float(one) for one in found if isinstance(one, int | float) and not isinstance(one, bool)]
    value = metric.of(numbers) if numbers else math.nan
    return value if math.isfinite(value) else None
