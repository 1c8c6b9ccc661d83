"""What became of a trial, as its run's folder in the bucket tells it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.runs.event_log import RunEvent, load_events
from tpu.runs.ledger import make_sum
from tpu.runs.logs import log_parts
from tpu.runs.overview import reached
from tpu.runs.record import RunNotFound, load_record
from tpu.runs.report import attempts_of
from tpu.runtime.metrics import read_metrics
from tpu.sweeps.trial import MalformedTrial

State = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """`value` is the metric's last one, `logged` what the program logs. US dollars; None if no price is known."""

    state: State
    value: float | None = None
    logged: tuple[str, ...] = ()
    step: int = 0
    attempts: int = 0
    seconds: float = 0.0
    dollars: float | None = None
    parameters_sha256: str | None = None
    slices: tuple[str, ...] = ()
    reason: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Outcome:
        try:
            values = json.loads(data)
            return cls(**values | {name: tuple(values[name]) for name in ("logged", "slices")})
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedTrial(
                f"the outcome of a trial cannot be understood ({error!r}): {data[:200]!r}"
            ) from error


def read_outcome(run_dir: str, metric: str, state: State, reason: str, now: float) -> Outcome:
    """The outcome of a trial that has just ended in `state`."""
    try:
        record = load_record(run_dir)
    except RunNotFound:  # it did not come so far
        return Outcome(state, reason=reason)
    fence, events = load_fence(run_dir), load_events(run_dir)
    if record.config.commits:
        rows: Sequence[Mapping[str, Any]] = read_metrics(run_dir, fence)
    else:
        rows = _printed(run_dir, fence.attempt)
    newest = fence.newest()
    prefix = "params/" if record.config.training else ""
    attempts = attempts_of(events)
    return Outcome(
        state=state,
        value=_last(rows, metric),
        logged=tuple(sorted({name for row in rows for name in row if name not in ("step", "attempt", "t")})),
        step=reached(record, fence, events),
        attempts=len(attempts),
        seconds=now - record.created,
        dollars=_dollars(events, now),
        parameters_sha256=run_digest(run_dir, newest.step, prefix) if newest else None,
        slices=tuple(dict.fromkeys(one["slice"] for one in attempts)),
        reason=reason,
    )


def _dollars(events: Sequence[RunEvent], now: float) -> float | None:
    return make_sum(events, now).dollars


def _last(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    for row in reversed(rows):
        value = row.get(metric)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if math.isfinite(value) else None
    return None


def _printed(run_dir: str, attempt: int) -> list[dict[str, Any]]:
    """Lines of a foreign program's output that are a JSON object."""
    text = b"".join(files.read(url) for url in log_parts(run_dir, attempt, 0))
    found = []
    for line in text.splitlines():
        if line.startswith(b"{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
