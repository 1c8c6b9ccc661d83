"""Watches that a training compiles nothing after its warm-up, and leaves no operator to the CPU.

Counts come from `xla_device.graph_counts`; this module only compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpu.train.xla_device import GraphCounts


@dataclass(frozen=True)
class GraphReport:
    """Since the start of the process: graphs that were compiled, how many of them after the warm-up, and operators
    that ran on the CPU."""

    compiled: int
    recompiled: int
    fallbacks: Mapping[str, int]


class GraphGuard:
    """Compares torch_xla's counts before and after steps.

    `counts` reads them, `cause` names the line of Python that compiled last, `tell` takes a sentence.
    """

    def __init__(
        self, counts: Callable[[], GraphCounts], cause: Callable[[], str | None], tell: Callable[[str], None]
    ) -> None:
        self._counts, self._cause, self._tell = counts, cause, tell
        self._warm: int | None = None
        self._seen = counts()

    def warmed_up(self) -> None:
        """From now on a compilation is one too many."""
        self._seen = self._counts()
        self._warm = self._seen.compiled

    def look(self, step: int) -> bool:
        """Whether something has happened since the last look that should not; it is told with its line."""
        before, now = self._seen, self._counts()
        self._seen = now
        more = now.compiled - before.compiled if self._warm is not None else 0
        if more > 0:
            line = self._cause() or "a line that torch_xla does not name"
            self._tell(f"compiled {more} graph(s) anew before step {step}: {line}")
        fallen = sorted(name for name, n in now.fallbacks.items() if n > before.fallbacks.get(name, 0))
        if fallen:
            self._tell(f"ran on the CPU before step {step}: {', '.join(fallen)}")
        return more > 0 or bool(fallen)

    def report(self) -> GraphReport:
        """The counts so far."""
        now = self._counts()
        warm = now.compiled if self._warm is None else self._warm
        return GraphReport(now.compiled, now.compiled - warm, dict(now.fallbacks))
