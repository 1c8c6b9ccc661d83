"""Attempts of a built-in trainer as real processes against a real bucket, started by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu.checkpoint.fence import Fence, close_attempt, load_fence, open_attempt, update_fence


@dataclass
class Attempt:
    """The processes of one attempt and the files that they write."""

    processes: list[subprocess.Popen[bytes]]
    folders: list[Path]

    def events(self, process: int = 0) -> list[dict[str, Any]]:
        """What a process has noted so far."""
        path = self.folders[process] / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float = 60) -> dict[str, Any]:
        """The first event of process 0 that meets the condition."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            for event in self.events():
                if condition(event):
                    return event
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.02)  # polling another process
        raise AssertionError(f"not seen in {deadline_s} s: {self.output()}")

    def exit_codes(self, deadline_s: float = 90) -> list[int]:
        """Wait for all processes to end."""
        try:
            return [process.wait(deadline_s) for process in self.processes]
        finally:
            self.kill()

    def output(self) -> str:
        return "\n".join((folder / "output").read_text() for folder in self.folders)

    def notice(self) -> None:
        """SIGTERM to all, as their supervisors do on a preemption notice."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class ByHand:
    """A run in the bucket, whose attempts a test starts one after the other."""

    gcs_url: str
    name: str
    folder: Path
    config: dict[str, Any]
    last_step: int
    stops: list[int]
    processes: int = 1
    devices: int = 4
    program: str = "tpu.train.jax_trainer"
    started: list[Attempt] = field(default_factory=list)

    @property
    def run_dir(self) -> str:
        return f"gs://relay-emulated/runs/{self.name}"

    def start(self, **variables: str) -> Attempt:
        """Close the last attempt, open the next one and start its processes."""
        number = load_fence(self.run_dir).attempt + 1

        def opened(fence: Fence) -> Any:
            return open_attempt(close_attempt(fence) if fence.open else fence, number)

        update_fence(self.run_dir, opened)
        folders = [self.folder / f"attempt-{number}" / str(i) for i in range(self.processes)]
        coordinator = f"127.0.0.1:{_free_port()}"
        attempt = Attempt(
            [self._process(i, number, folders[i], coordinator, variables) for i in range(self.processes)],
            folders,
        )
        self.started.append(attempt)
        return attempt

    def _process(
        self, index: int, attempt: int, folder: Path, coordinator: str, variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        home = self.folder / f"home-{index}"
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "STORAGE_EMULATOR_HOST": self.gcs_url,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(self.devices),
            "RELAY_RUN_DIR": self.run_dir,
            "RELAY_ATTEMPT": str(attempt),
            "RELAY_STOP_STEPS": ",".join(map(str, self.stops)),
            "RELAY_LAST_STEP": str(self.last_step),
            "RELAY_CONFIG": str(folder / "config.json"),
            "RELAY_EVENTS": str(folder / "events.jsonl"),
            "RELAY_COORDINATOR": coordinator,
            "RELAY_NUM_PROCESSES": str(self.processes),
            "RELAY_PROCESS_ID": str(index),
            **variables,
        }
        cores = sorted(os.sched_getaffinity(0))
        core = cores[index % len(cores)]
        with (folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, "-m", self.program],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
