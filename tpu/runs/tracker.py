"""Hands the metrics of a run to where `tracking` wants them, too: each step once, once a commit has made it final.

A flow that was killed goes on behind the last step that it finds in the place itself, so nothing is there twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.retry import StorageUnavailable
from tpu.hosts.address import HostAddress
from tpu.runs.committed import CommittedRows
from tpu.runs.config import RunConfig, RunConfigError, Tracking
from tpu.runs.event_log import load_events
from tpu.runs.overview import reached
from tpu.runs.record import RunRecord
from tpu.runs.sink import Sink
from tpu.runs.tensorboard import TensorBoardFiles
from tpu.runs.wandb_run import WandbRun
from tpu.runs.watch import Listener
from tpu.runtime.metrics import read_logged

# A place that does not answer holds nobody up for longer at the end of a run.
CLOSE_S = 120.0


def check_tracking(config: RunConfig) -> None:
    """Raises RunConfigError if a package that `tracking` wants is not here."""
    tracking = config.tracking
    for wanted, field, package in (
        (tracking.wandb is not None, "wandb", "wandb"),
        (tracking.tensorboard, "tensorboard", "tensorboardX"),
    ):
        if wanted and find_spec(package) is None:
            raise RunConfigError(
                f"tracking.{field}: the package {package} is not installed where the flow runs: "
                f"pip install 'tpu-relay[{field}]'"
            )


def sinks_of(
    tracking: Tracking, record: RunRecord, run_dir: str, wandb_key: str | None, home: Path
) -> dict[str, Sink]:
    """The places by their names. `home` is where this machine keeps what is its own."""
    sinks: dict[str, Sink] = {}
    if tracking.wandb is not None:
        sinks["Weights & Biases"] = WandbRun(run_dir, record, tracking.wandb, wandb_key, home)
    if tracking.tensorboard:
        sinks["TensorBoard"] = TensorBoardFiles(run_dir)
    return sinks


class Tracker:
    """Follows one run for as long as it is entered; trouble with a place is said and ends nothing.

    What earlier drivers have left is handed on at once, what is left at the end when it is left, unless another
    process acts for the run by then: `check` raises if so. A run that makes no commits of ours is handed on at its end.
    """

    def __init__(
        self,
        record: RunRecord,
        run_dir: str,
        sinks: Mapping[str, Sink],
        check: Callable[[], Awaitable[None]],
        report: Callable[[str], None],
    ) -> None:
        self._record = record
        self._run_dir = run_dir
        self._sinks = sinks
        self._check = check
        self._report = report
        self._followed: dict[str, CommittedRows] = {}
        self._troubles: set[str] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # One thread of its own: steps are handed on one after the other, and a slow place holds up nobody else.
        self._thread = ThreadPoolExecutor(1, "tracker")

    def committed(self) -> None:
        """There is a new commit."""
        self._wake.set()

    async def __aenter__(self) -> Self:
        if self._sinks and self._record.config.commits:
            self._wake.set()
            self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._sinks:
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._check()
            ours = True
        except Exception:  # whoever acts for the run says so itself
            ours = False
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close, ours)
        try:
            await asyncio.wait_for(closing, CLOSE_S)
        except TimeoutError:
            self._say(f"metrics were not handed on within {CLOSE_S:.0f} s; the next start goes on with that")
        self._thread.shutdown(wait=False)

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._hand_on)

    def _hand_on(self) -> None:
        for name, sink in self._sinks.items():
            with self._trouble_is_said(name):
                if name not in self._followed:
                    self._followed[name] = CommittedRows(self._run_dir, sink.last())
                if rows := self._followed[name].new(load_fence(self._run_dir)):
                    try:
                        sink.write(rows)
                    except BaseException:
                        del self._followed[name]  # what it has got is asked for again
                        raise

    def _hand_on_logged(self) -> None:
        for name, sink in self._sinks.items():
            with self._trouble_is_said(name):
                last = sink.last()
                if rows := [row for row in read_logged(self._run_dir) if int(str(row["step"])) > last]:
                    sink.write(rows)

    def _close(self, ours: bool) -> None:
        if ours:
            self._hand_on() if self._record.config.commits else self._hand_on_logged()
        done = self._is_done()
        for name, sink in self._sinks.items():
            with self._trouble_is_said(name):
                sink.close(done)

    def _is_done(self) -> bool:
        try:
            found = reached(self._record, load_fence(self._run_dir), load_events(self._run_dir))
        except StorageUnavailable:
            return False
        return found >= self._record.config.steps

    @contextlib.contextmanager
    def _trouble_is_said(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # metrics are in the bucket: training must not end for a copy of them
            self._say(f"metrics were not handed to {name}, and will be with the next commit: {error!r}")

    def _say(self, trouble: str) -> None:
        if trouble not in self._troubles:
            self._troubles.add(trouble)
            self._report(trouble)


class CommitHeard:
    """Hears a gang for somebody, and tells a tracker of its commits."""

    def __init__(self, listener: Listener, tracker: Tracker) -> None:
        self._listener = listener
        self._tracker = tracker

    def on_log(self, host: HostAddress, line: str) -> None:
        self._listener.on_log(host, line)

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None:
        self._listener.on_event(host, record)
        if record["event"] == "commit":
            self._tracker.committed()

    def on_end(self) -> None:
        self._listener.on_end()
