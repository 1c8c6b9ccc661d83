"""The guard of graphs around a PyTorch/XLA loop: what it sees goes to the log, to the run's events and its report.

guard = StepGuard(seg, xla_device.prepare(folder), warm_up=2)    # before torch_xla is imported
for step in seg.steps():
    ...
    guard.after(step + 1)
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tpu.runtime.segment import Segment
from tpu.train import xla_device
from tpu.train.graph_guard import GraphGuard


class StepGuard:
    """Counts what is compiled after the first `warm_up` calls of an attempt, and what falls back to the CPU."""

    def __init__(self, seg: Segment, causes: Path, warm_up: int = 1) -> None:
        """`causes` is the file of `xla_device.prepare`. A loop with torch.optim compiles twice: its moments appear at
        the first step, so its `warm_up` is 2."""
        self._seg = seg
        self._cold = warm_up
        self._guard: GraphGuard | None = None
        self._causes = causes

    def after(self, step: int) -> None:
        """Look, after the call that ended at `step`."""
        if self._guard is None:
            self._guard = GraphGuard(xla_device.graph_counts, self._cause, _say)
        self._cold -= 1
        if self._cold == 0:
            self._guard.warmed_up()
        happened = self._cold < 0 and self._guard.look(step)
        if happened or self._cold == 0 or step == self._seg.last_step:
            self._seg.event("graphs", **asdict(self._guard.report()))

    def _cause(self) -> str | None:
        return xla_device.last_cause(self._causes)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
