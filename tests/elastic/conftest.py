"""A run of members in processes of their own on this machine, with a real coordinator, killed by signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.process import main
from tpu.elastic.coordinator import Coordinator
from tpu.elastic.rules import Options

# NumPy's threads would fight over the cores; forked processes begin at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.elastic.process"])


class CoordinatorThread:
    """A coordinator beside the test; `end` is as sudden for its members as its death."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.events: list[dict[str, Any]] = []
        self._folder, self._options = folder, options
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        self.coordinator = Coordinator(self._options, "a-key", self._note)
        self._task = self._loop.create_task(self.coordinator.serve("127.0.0.1", 0, self._listening))
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def _note(self, kind: str, **fields: Any) -> None:
        self.events.append({"t": time.time(), "kind": kind, **fields})

    def _listening(self, port: int) -> None:
        (self._folder / "port.new").write_text(str(port))
        (self._folder / "port.new").rename(self._folder / "port")
        self._ready.set()

    def end(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


class Members:
    """The processes of a run and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordinator: CoordinatorThread | None = None
        self.processes: list[tuple[str, BaseProcess]] = []

    def start(self, slice_name: str, **told: Any) -> BaseProcess:
        message = {"slice": slice_name, "folder": str(self.folder), **told}
        process = FORKS.Process(target=main, args=(message,))
        process.start()
        self.processes.append((slice_name, process))
        return process

    def records(self, slice_name: str = "*") -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob(f"{slice_name}-*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(
                        {"slice": path.stem.rpartition("-")[0], "file": path.name, **json.loads(line)}
                    )
                except ValueError:
                    continue  # the line that its writer was killed in
        return sorted(found, key=lambda record: record["t"])

    def wait(self, timeout_s: float = 120) -> None:
        """Until every process has ended."""
        deadline = time.monotonic() + timeout_s
        for name, process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode is None:
                for _, other in self.processes:
                    if other.exitcode is None and other.pid is not None:
                        os.kill(other.pid, signal.SIGUSR1)
                time.sleep(0.5)  # they write where they are
                errors = {n: (self.folder / f"{n}.err").read_text()[-1500:] for n, _ in self.processes}
                raise AssertionError(
                    f"{name} goes on; errors: {errors}; events: {self.told()} last: {self.records()[-12:]}"
                )

    def until(self, condition: Any, what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen: {self.told()} {self.records()[-5:]}"
            time.sleep(0.02)  # looks again: files are written by other processes

    def reached(self, step: int) -> bool:
        return any(record.get("step", -1) >= step for record in self.records())

    def told(self) -> list[dict[str, Any]]:
        return self.coordinator.events[-14:] if self.coordinator is not None else []

    def result(self) -> tuple[dict[int, str], str]:
        """Losses by step, and the final state's hash; whoever told a step or an end told the same."""
        losses: dict[int, str] = {}
        ends = set()
        for record in self.records():
            if "step" in record:
                assert losses.setdefault(record["step"], record["loss"]) == record["loss"], record
            if "done" in record:
                ends.add(record["done"])
        assert len(ends) == 1, [record for record in self.records() if "step" not in record]
        return dict(sorted(losses.items())), ends.pop()

    def end(self) -> None:
        for _, process in self.processes:
            process.kill()
            process.join()


class Lab:
    """Runs in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._ends: list[Any] = []

    def open(self, **options: Any) -> tuple[Members, CoordinatorThread]:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        members, coordinator = Members(folder), self.coordinate(folder, **options)
        members.coordinator = coordinator
        self._ends.append(members.end)
        return members, coordinator

    def coordinate(self, folder: Path, **options: Any) -> CoordinatorThread:
        coordinator = CoordinatorThread(folder, Options(**options))
        self._ends.append(coordinator.end)
        return coordinator

    def close(self) -> None:
        for end in self._ends:
            end()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    opened = Lab(tmp_path)
    yield opened
    opened.close()
