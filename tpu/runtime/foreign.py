"""Run a command that knows nothing of us, in a folder of its own, and carry the metrics that it logs to run and bucket.

    python -I -S foreign.py [--metrics-file PATH] -- COMMAND…

Metrics are numbers of JSON objects, one a line: of what the command prints, of a file that it writes, and of the record
that Weights & Biases keeps of a run. The command's output and end are handed on as they are. Standard library only: it
runs beside the command's own packages, whatever they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

# Whatever else is called `tpu` in the command's tree, this is part of ours.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tpu.runtime.events import EventLog
from tpu.runtime.supervisor import Web
from tpu.runtime.wandb_record import WandbHistory

LOOK_S = 1.0
UPLOAD_EVERY_S = 10.0
CHUNK_BYTES = 64 << 10
# A line that is longer is no record of metrics.
LONGEST_LINE = 1 << 20
NOT_FOUND, NOT_EXECUTABLE = 127, 126
STEP_NAMES = ("step", "_step")
# What a record may not call a metric, since events have these.
RESERVED = ("t", "event", "attempt", *STEP_NAMES)

Numbers = dict[str, float]


class Source(Protocol):
    """Gives the records that are new since it was asked last."""

    def new(self) -> Iterable[Mapping[str, Any]]: ...


def numbers_of(record: Mapping[str, Any], before: str = "") -> Numbers:
    """The metrics of a record; those of a record in it have its name before theirs."""
    found: Numbers = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= numbers_of(value, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{before}{name}"] = value
    return {name: value for name, value in found.items() if not name.startswith("_") and name not in RESERVED}


def step_of(record: Mapping[str, Any]) -> int | None:
    for name in STEP_NAMES:
        step = record.get(name)
        if isinstance(step, int) and not isinstance(step, bool):
            return step
    return None


def as_record(line: bytes) -> Mapping[str, Any] | None:
    """A line that is a JSON object."""
    if not line.startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Lines:
    """Whole lines of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        yield from whole

    def end(self) -> Iterator[bytes]:
        yield self._rest
        self._rest = b""


class JsonLines:
    """A file that grows, or is written anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = Lines()

    def new(self) -> Iterator[Mapping[str, Any]]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._lines = 0, Lines()
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or not to be read now
            return
        self._offset += len(data)
        for line in self._lines.feed(data):
            if (record := as_record(line)) is not None:
                yield record


class Metrics:
    """Collects records and brings them to the flow at once, and to the bucket every few seconds."""

    def __init__(self, attempt: int, events: EventLog, upload: Callable[[int, bytes], None]) -> None:
        self._events = events
        self._upload = upload
        self._lock = threading.Lock()
        self._count = 0
        self._part = 0
        self._kept: list[Mapping[str, object]] = []
        self._uploaded_at = time.monotonic()
        events.write("start", attempt=attempt)

    def add(self, record: Mapping[str, Any]) -> None:
        if not (numbers := numbers_of(record)):
            return
        with self._lock:
            self._count += 1
            step = step_of(record)
            # A program that counts nothing is counted.
            event = self._events.write("logged", step=self._count if step is None else step, **numbers)
            self._kept.append({name: value for name, value in event.items() if name != "event"})

    def tick(self, last: bool = False) -> None:
        """Upload what was collected, if it is time; what could not be is uploaded with the next part."""
        if not last and time.monotonic() - self._uploaded_at < UPLOAD_EVERY_S:
            return
        self._uploaded_at = time.monotonic()
        with self._lock:
            taken = list(self._kept)
        if not taken:
            return
        try:
            self._upload(self._part, "".join(json.dumps(record) + "\n" for record in taken).encode())
        except (OSError, KeyError, ValueError) as error:
            print(f"metrics were not uploaded: {error}", file=sys.stderr, flush=True)
            return
        self._part += 1
        with self._lock:
            del self._kept[: len(taken)]


def run(command: list[str], metrics: Metrics, sources: list[Source], folder: Path) -> int:
    """Run the command in `folder` until it has ended; its exit code, negative for a signal."""
    # Whoever ends the attempt tells all of its processes; we stay until the command has left.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        print(f"cannot start {command[0]!r} in {folder}: {error}", file=sys.stderr, flush=True)
        return NOT_EXECUTABLE if isinstance(error, PermissionError) else NOT_FOUND
    assert child.stdout is not None
    reader = threading.Thread(target=_pass_on, args=(child.stdout.fileno(), metrics), daemon=True)
    reader.start()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK_S)
        # Asked after each look at the child: what it wrote before its end is read then.
        for source in sources:
            for record in source.new():
                metrics.add(record)
        if child.returncode is not None:
            break
        metrics.tick()
    # What it has started and left behind may hold its output open; all that is there by now is passed on.
    reader.join(LOOK_S)
    metrics.tick(last=True)
    return child.returncode


def _pass_on(output: int, metrics: Metrics) -> None:
    lines = Lines()
    while data := os.read(output, CHUNK_BYTES):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]
        _add_all(lines.feed(data), metrics)
    _add_all(lines.end(), metrics)


def _add_all(lines: Iterable[bytes], metrics: Metrics) -> None:
    for line in lines:
        if (record := as_record(line)) is not None:
            metrics.add(record)


def own_folder(attempt_dir: Path, code: Path) -> Path:
    """A copy of the program's tree for this run alone: others on the same host write theirs.

    It is the same one for all attempts of the run with this code on this host.
    """
    folder = attempt_dir.parent / f"work-{code.name}"
    if not folder.exists():
        part = attempt_dir / "work"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(code, part, symlinks=True)
        part.rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command, and carry the metrics that it logs.")
    parser.add_argument("--metrics-file", help="JSON lines that it writes, relative to its working folder")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    environment = os.environ
    attempt = int(environment["RELAY_ATTEMPT"])
    folder = own_folder(Path(environment["RELAY_ATTEMPT_DIR"]), Path.cwd())
    if "WANDB_API_KEY" not in environment:  # it would ask for one, and nobody answers
        environment.setdefault("WANDB_MODE", "offline")
    if environment.get("RELAY_PROCESS_ID", "0") != "0":  # one process tells of the run
        os.chdir(folder)
        os.execvp(arguments.command[0], arguments.command)
    sources: list[Source] = [WandbHistory(folder / environment.get("WANDB_DIR", ""))]
    if arguments.metrics_file:
        sources.append(JsonLines(folder / arguments.metrics_file))
    web = Web(dict(environment), None)
    prefix = f"{environment['RELAY_RUN_DIR']}/metrics/{attempt}"

    def upload(part: int, data: bytes) -> None:
        web.upload(f"{prefix}-{part:06d}.jsonl", data)

    metrics = Metrics(attempt, EventLog(Path(environment["RELAY_EVENTS"])), upload)
    code = run(arguments.command, metrics, sources, folder)
    if code < 0:  # as the command itself: how it has ended is seen from outside
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
