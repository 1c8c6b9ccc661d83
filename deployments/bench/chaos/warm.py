"""Starts `python -m flows.train …` again and again, forked from a process that has done the imports already.

What a start costs is mostly imports, seconds of CPU, and histories start many. A flow that is forked here is a process
of its own, with its own output, which runs the module as Python would and dies of SIGKILL like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where `deployments` is found, wherever the caller is.
ROOT = Path(__file__).parents[3]
MODULE = "flows.train"
# Imported where they are wanted; here all are there at the fork.
LATE = ("gcsfs", "google.cloud.storage", "matplotlib.figure", "prefect.events.clients", "tpu.cloud.google")


@dataclass
class Flow:
    """A flow that was started."""

    pid: int
    log: Path
    ended: Path

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it lives."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self.ended.read_text())
        return None

    def wait(self, within_s: float = 60.0) -> int:
        """Its exit code, once it has ended.

        Raises:
            TimeoutError: it lives on.
        """
        end = time.monotonic() + within_s
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"the flow {self.pid} did not end in {within_s:.0f} s; its log: {self.log}"
                )
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class WarmStarts:
    """Starts flows; the process behind it ends with the block, and with the process that made it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployments.bench.chaos.warm"], env=dict(environment), cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._count = 0

    def start(self, arguments: Sequence[str], folder: Path, log: Path, **environment: str) -> Flow:
        """Start `python -m flows.train ARGUMENTS` in a folder, its output appended to `log`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._count += 1
            ended = log.with_suffix(f".{self._count}.ended")
            ended.unlink(missing_ok=True)
            request = {"arguments": list(arguments), "folder": str(folder), "log": str(log),
                       "ended": str(ended), "environment": environment}  # fmt: skip
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return Flow(int(self._process.stdout.readline()), log, ended)

    def close(self) -> None:
        """Start no more; what was started goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def warm_starts(environment: Mapping[str, str]) -> Iterator[WarmStarts]:
    made = WarmStarts(environment)
    try:
        yield made
    finally:
        made.close()


def serve() -> dict[str, Any] | None:
    """Fork for each request on stdin; returns the request in the child, and None once stdin is closed."""
    running: dict[int, str] = {}
    buffer = b""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(running)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return None
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(waker)
                return request
            running[pid] = request["ended"]
            print(pid, flush=True)


def _reap(running: dict[int, str]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        part = Path(running[pid] + ".part")
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.replace(running.pop(pid))


def become(request: dict[str, Any]) -> None:
    """Turn this process into the flow that was asked for."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = [MODULE, *request["arguments"]]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def main() -> None:
    import importlib

    for name in (MODULE, *LATE):
        importlib.import_module(name)
    del sys.modules[MODULE]  # it is run, not imported
    if (request := serve()) is not None:
        become(request)


if __name__ == "__main__":
    main()
