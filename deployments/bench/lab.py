"""What the benchmarks share: an emulated cloud, runs of the real flow in it, and how they tell what they found."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.prefect_server import prefect_server
from tpu.checkpoint.fence import Fence, load_fence
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.emulator.processes import marked_processes
from tpu.runs.config import RunConfig
from tpu.runs.record import run_directory

FOLDER = Path(".relay/bench").absolute()
# Beyond this load of the machine figures are told, but not to be trusted.
QUIET_LOAD = 1.0


class BenchFailed(RuntimeError):
    """What was to be measured did not happen; the message says what, and where the log is."""


@dataclass(frozen=True)
class Lab:
    """An emulated cloud with a Prefect server. `environment` leads flows to both."""

    emulator: Emulator
    environment: dict[str, str]

    @property
    def connection(self) -> Connection:
        return Connection.from_environment(self.emulator.env)

    def run_dir(self, name: str) -> str:
        return run_directory(self.emulator.env["TPU_RELAY_BUCKET"], name)

    def fence(self, name: str) -> Fence:
        return load_fence(self.run_dir(name))

    @contextlib.contextmanager
    def flow(self, config: RunConfig) -> Iterator[subprocess.Popen[bytes]]:
        """The flow of a run as a process of its own; stopped at the end of the block, which deletes its slices.

        Raises:
            BenchFailed: it ended by a failure.
        """
        file, log = (FOLDER / f"{config.name}.{ending}" for ending in ("yaml", "log"))
        # The built-in trainer needs no source but ours, so the program's own working tree is an empty folder.
        program = FOLDER / "program"
        program.mkdir(exist_ok=True)
        file.write_text(config.model_dump_json())  # JSON is YAML
        with log.open("wb") as output:
            flow = subprocess.Popen(
                [sys.executable, "-m", "flows.train", str(file)], env=self.environment, cwd=program,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            yield flow
            if flow.poll() not in (None, 0):
                raise BenchFailed(f"the flow of {config.name} ended with {flow.returncode}; its log: {log}")
        finally:
            if flow.poll() is None:
                flow.terminate()  # and not SIGINT, which children of a background shell ignore
                flow.wait()


@contextlib.contextmanager
def open_lab(hosts_alone: bool) -> Iterator[Lab]:
    """Start the lab. With `hosts_alone` the emulated hosts have the first core for themselves.

    A TPU VM shares its cores with nobody: neither with the flow and the Prefect server, nor with the cloud's own
    servers. All of these, and this process, then get the other cores.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(
        FOLDER / "prefect", ignore_errors=True
    )  # what an earlier benchmark told its server changes nothing
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, nothing is left behind
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:]) or {cores[0]}
    if hosts_alone:
        os.sched_setaffinity(0, {cores[0]})  # hosts are given cores that the emulator has at its start
    with contextlib.ExitStack() as stack:
        emulator = stack.enter_context(Emulator())
        if hosts_alone:
            marker = f"TPU_EMULATOR_ID={emulator.record.emulator_id}"
            for pid in (os.getpid(), emulator.pid, *(process.pid for process in marked_processes(marker))):
                move(pid, others)
        server = stack.enter_context(prefect_server(FOLDER / "prefect"))
        os.environ.update(emulator.env)  # for the readers of the bucket in this process
        yield Lab(emulator, {**os.environ, **server})


def move(pid: int, cores: set[int]) -> None:
    """Let every thread of a process run on these cores alone."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def until(condition: Callable[[], bool], what: str, flow: subprocess.Popen[bytes], within_s: float) -> None:
    """Poll until the condition holds.

    Raises:
        BenchFailed: the flow ended before, or the time is over.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if flow.poll() is not None or time.monotonic() > deadline:
            why = "the flow ended" if flow.poll() is not None else f"{within_s:.0f} s were over"
            raise BenchFailed(f"{why} before {what}; logs are in {FOLDER}")
        time.sleep(0.2)


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    names = [
        line.partition(":")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": names[0].strip() if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m deployments.bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--short", action="store_true", help="a quick look: too short for figures to be quoted")
    return made


def tell(figures: dict[str, Any]) -> None:
    """Print the result as the last line."""
    load = figures["machine"]["load_at_start"]
    if load > QUIET_LOAD:
        say(f"the machine was busy (load {load}): take the figures with a grain of salt")
    print(json.dumps(figures), flush=True)
