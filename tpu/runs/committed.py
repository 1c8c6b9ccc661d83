"""A run's metrics as its commits make them final: each step once, in order."""

from __future__ import annotations

from typing import Any

from tpu.checkpoint.fence import Fence
from tpu.runtime.metrics import MetricsParts, Record, merged


class CommittedRows:
    """Follows the metrics of one run, behind step `after`; each part of them is read once."""

    def __init__(self, run_dir: str, after: int) -> None:
        self._parts = MetricsParts(run_dir)
        self._after = after
        self._waiting: list[tuple[int, Record]] = []

    def new(self, fence: Fence) -> list[dict[str, Any]]:
        """The rows up to the newest commit that were not given before. `fence` was read before this is asked: what a
        commit covers is in the bucket before it is made. May raise tpu.checkpoint.retry.StorageUnavailable."""
        newest = fence.newest()
        if newest is None or newest.step <= self._after:
            return []
        self._waiting += [
            (attempt, record)
            for attempt, record in self._parts.new()
            if isinstance(step := record.get("step"), int) and step > self._after and "event" not in record
        ]
        rows = [row for row in merged(self._waiting, fence) if _step(row) <= newest.step]
        self._after = newest.step
        self._waiting = [(attempt, row) for attempt, row in self._waiting if _step(row) > newest.step]
        return rows


def _step(row: Record) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step
