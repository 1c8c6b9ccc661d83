"""A local bucket for tests, and small trainings in it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpu.checkpoint.fence import Fence, close_attempt, load_fence, open_attempt, update_fence
from tpu.emulator.gcs import GcsServer

DEADLINE_S = 60.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Bucket:
    """A GCS server with the one bucket `relay-emulated`; its objects are files under `root`."""

    server: GcsServer
    url: str
    root: Path

    def new_run(self) -> str:
        """A run directory nobody has used, with attempt 1 open."""
        run_dir = f"gs://relay-emulated/runs/r{next(_numbers)}"
        opened(run_dir, 1)
        return run_dir

    def file(self, url: str) -> Path:
        """The file that holds an object's bytes, to damage it behind the server's back."""
        return self.root / url.removeprefix("gs://")

    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


def opened(run_dir: str, attempt: int) -> Fence:
    """Close what is open and let `attempt` write, as the flow does before it starts a gang."""
    return update_fence(run_dir, lambda fence: open_attempt(fence, attempt))


def closed(run_dir: str) -> Fence:
    return update_fence(run_dir, close_attempt)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fails after the deadline with `what` it waited for."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.005)


def committed_steps(run_dir: str) -> list[int]:
    return [commit.step for commit in load_fence(run_dir).commits]


@dataclass
class Trainer:
    """One process of the NumPy trainer."""

    process: subprocess.Popen[str]
    events_path: Path

    def events(self, kind: str | None = None) -> list[dict[str, object]]:
        """What it has said so far, all or of one kind."""
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [e for e in found if kind is None or e["event"] == kind]

    def await_step(self, step: int) -> None:
        wait_until(
            lambda: self.process.poll() is not None or any(e["step"] == step for e in self.events("step")),
            f"step {step}",
        )

    def notice(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> int:
        """Its exit code; what it printed is shown if the test fails."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        print(output)
        self.output = output
        return self.process.returncode

    output: str = field(default="", init=False)


@dataclass(frozen=True)
class Training:
    """A run of the NumPy trainer: `start` one of its processes."""

    bucket: Bucket
    folder: Path
    run_dir: str
    last_step: int = 20
    stop_steps: tuple[int, ...] = (5, 10, 15, 20)
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = "tests.trainers.numpy_trainer"

    def start(self, attempt: int, process: int = 0, processes: int = 1, **more: str) -> Trainer:
        name = f"{self.run_dir.rpartition('/')[2]}-{attempt}-{process}"
        events = self.folder / f"{name}.events.jsonl"
        environment = {
            **os.environ,
            **self.bucket.environment(),
            "OMP_NUM_THREADS": "1",
            "RELAY_RUN_DIR": self.run_dir,
            "RELAY_ATTEMPT": str(attempt),
            "RELAY_LAST_STEP": str(self.last_step),
            "RELAY_STOP_STEPS": ",".join(map(str, self.stop_steps)),
            "RELAY_SEED": "7",
            "RELAY_EVENTS": str(events),
            "RELAY_PROCESS_ID": str(process),
            "RELAY_NUM_PROCESSES": str(processes),
            **self.environment,
            **more,
        }
        command = [sys.executable, "-m", self.program]
        process_ = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return Trainer(process_, events)
