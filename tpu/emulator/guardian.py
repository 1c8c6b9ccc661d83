"""Ends everything an emulator started when the emulator ends, in whatever way, SIGKILL included.

The guardian is a separate small process that does nothing but hold one end of a pipe. At the pipe's end it
SIGKILLs every process that carries the emulator's id in its environment or descends from one that does, until
none is left, and then removes the state folder if that is temporary. Standard library only; the process is
started as `python -I -S guardian.py …`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from tpu.emulator.processes import Process, kill_all, marked_processes
else:  # as a lone script its neighbour is found beside it
    sys.path.append(str(Path(__file__).parent))
    from processes import Process, kill_all, marked_processes

END_DEADLINE_S = 30.0


class Guardian:
    """The emulator's side: starts the guardian process, and starts another if that is killed."""

    def __init__(self, emulator_id: str, state_dir: Path, *, remove_state: bool) -> None:
        self._command = [
            *(sys.executable, "-I", "-S", str(Path(__file__).resolve())),
            *(emulator_id, str(os.getpid()), str(state_dir) if remove_state else ""),
        ]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        with self._lock:
            return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the guardian; from here on nothing can be left behind."""
        self._process = self._spawn()
        threading.Thread(target=self._watch, name="guardian-watch", daemon=True).start()

    def stop(self) -> None:
        """Let the guardian do its work now; returns when nothing is left and the state folder is gone.

        Raises:
            subprocess.TimeoutExpired: it is not done after END_DEADLINE_S seconds.
        """
        with self._lock:
            self._stopping = True
            process, self._process = self._process, None
        if process is None:
            return
        _release(process)
        while process.wait(END_DEADLINE_S) != 0:  # it was killed before its work was done
            process = self._spawn()
            _release(process)

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, start_new_session=True
        )

    def _watch(self) -> None:
        while True:
            with self._lock:
                process = self._process
            if process is None:
                return
            process.wait()
            with self._lock:
                if self._stopping:
                    return
                self._process = self._spawn()


def _release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def main(arguments: list[str]) -> int:
    """Wait for the end of standard input, then clean up. Returns the exit code."""
    emulator_id, emulator_pid, remove = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        continue
    spared = [os.getpid(), int(emulator_pid)]  # an emulator that stops in order ends itself

    def find() -> list[Process]:
        return marked_processes(f"TPU_EMULATOR_ID={emulator_id}", exclude=spared)

    kill_all(find, END_DEADLINE_S)
    if remove:
        shutil.rmtree(remove, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
