"""A run over emulated slices that loses one and gets it back: how long no step was finished, in step times."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deployments.bench.lab import FOLDER, BenchFailed
from tpu.elastic.coordinator import Coordinator
from tpu.elastic.rules import Options

Event = dict[str, Any]


def gaps(slices: int, units: int, unit_s: float, steps: int) -> dict[str, Any]:
    """Kill one of `slices` members at a third of the steps, start it again some steps later, wait for the end.

    Raises BenchFailed if a member ends otherwise, or members end with different parameters.
    """
    folder = FOLDER / f"elastic-{slices}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    key = secrets.token_hex(16)
    options = Options(units, expect=slices, reconnect_s=1.0, ahead_s=1.0, last_step=steps)
    with coordinating(options, key) as (port, events), contextlib.ExitStack() as stack:

        def start(name: str, life: int) -> subprocess.Popen[bytes]:
            told = {
                "slice": name, "life": life, "folder": str(folder), "key": key, "port": port, "units": units,
                "unit_s": unit_s, "steps": steps,
            }  # fmt: skip
            command = [sys.executable, "-m", "deployments.bench.elastic.member", json.dumps(told)]
            process = subprocess.Popen(command, stderr=(folder / f"{name}-{life}.err").open("wb"))
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        members = [start(f"slice-{number}", 0) for number in range(slices)]
        watched = folder / "slice-0-0.jsonl"
        third, patience_s = steps // 3, steps * unit_s * units
        wait_until(lambda: reached(watched, third), "a third of the steps is done", members[0], patience_s)
        killed = time.time()
        members[-1].kill()
        some = third + third // 3
        wait_until(lambda: reached(watched, some), "some steps went without it", members[0], patience_s)
        back = start(f"slice-{slices - 1}", 1)
        for member in [*members[:-1], back]:
            if member.wait(60 + 2 * steps * unit_s * units) != 0:
                raise BenchFailed(f"a member ended with {member.returncode}; its log is in {folder}")
        detected = next(e["t"] for e in events if e["kind"] == "is out")
        entry = [e for e in events if e["kind"] == "takes part"][-1]["step"]
    return figures(folder, killed, detected, entry)


def figures(folder: Path, killed: float, detected: float, entry: int) -> dict[str, Any]:
    """Gaps from what the members wrote: a step is finished when its first member has applied it."""
    records = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    hashes = {record["hash"] for record in records if "hash" in record}
    if len(hashes) != 1:
        raise BenchFailed(f"members ended with {len(hashes)} different parameters")
    finished: dict[int, float] = {}
    for record in records:
        if "step" in record:
            finished[record["step"]] = min(record["t"], finished.get(record["step"], record["t"]))
    times = [finished[step] for step in sorted(finished)]
    lengths = [(b - a, a, step) for step, (a, b) in enumerate(itertools.pairwise(times), 1)]
    before = statistics.median(length for length, at, _ in lengths[3:] if at + length < killed)
    fewer = statistics.median(length for length, at, step in lengths if at > detected and step < entry - 1)
    after = statistics.median(length for length, _, step in lengths if step > entry + 2)
    # The longest time without a finished step around each event; beyond a step's own time it is what the event cost.
    loss = max(length for length, at, _ in lengths if at <= detected + fewer and at + length >= killed)
    entering = max(length for length, _, step in lengths if entry - 1 <= step <= entry + 1)
    return {
        "loss_gap_steps": round((loss - (detected - killed)) / fewer, 3),
        "loss_gap_s": round(loss, 4),
        "detection_s": round(detected - killed, 4),
        "return_gap_steps": round((entering - after) / after, 3),
        "return_gap_s": round(entering, 4),
        "step_s": {"before": round(before, 4), "with one less": round(fewer, 4), "after": round(after, 4)},
    }


def reached(path: Path, step: int) -> bool:
    return path.exists() and f'"step": {step}}}' in path.read_text()


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes], within_s: float
) -> None:
    deadline = time.monotonic() + within_s + 60
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchFailed(f"the first member ended, or time was over, before {what}")
        time.sleep(0.02)  # looks again at what other processes have written


@contextlib.contextmanager
def coordinating(options: Options, key: str) -> Iterator[tuple[int, list[Event]]]:
    """A coordinator beside this thread: its port, and its events as they come."""
    events: list[Event] = []
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    def listening(port: int) -> None:
        ports.append(port)
        ready.set()

    def note(kind: str, **fields: Any) -> None:
        events.append({"t": time.time(), "kind": kind, **fields})

    coordinator = Coordinator(options, key, note)
    task = loop.create_task(coordinator.serve("127.0.0.1", 0, listening))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield ports[0], events
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
