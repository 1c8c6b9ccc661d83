"""What a place for metrics is, besides the bucket's own JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_NO_METRICS = ("step", "attempt", "t")


class Sink(Protocol):
    """A place for the metrics of one run. Its methods block; any of them may raise whatever its library does."""

    def last(self) -> int:
        """The last step that it has; asked before anything is written."""
        ...

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of ascending steps behind the last one; there is at least one."""
        ...

    def close(self, ended_well: bool) -> None: ...


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row."""
    return {
        name: value
        for name, value in row.items()
        if name not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
