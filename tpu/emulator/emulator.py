"""The emulator as a context manager: `with Emulator() as emulator:` starts one and leaves nothing of it.

It runs as a process of its own, so that whatever happens to the caller or to it, the other is not harmed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tpu.emulator.client import ControlClient
from tpu.emulator.processes import marked_processes

RECORD_NAME = "emulator.json"
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.02


class EmulatorFailed(RuntimeError):
    """The emulator did not start, or did not stop; the message has the end of its log."""


@dataclass(frozen=True)
class EmulatorRecord:
    """What a running emulator writes about itself into its state folder, readable by its owner only.

    `started` tells its process from a later one of the same pid.
    """

    emulator_id: str
    pid: int
    started: int
    guardian_pid: int
    control: str
    env: dict[str, str]

    @property
    def key(self) -> str:
        return self.env["TPU_RELAY_API_KEY"]

    def write(self, state_dir: Path) -> None:
        """Write the record at once or not at all: its appearance says that the emulator is ready."""
        part = state_dir / f".{RECORD_NAME}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(vars(self), file, indent=1)
        part.replace(state_dir / RECORD_NAME)


def read_record(state_dir: Path) -> EmulatorRecord | None:
    """Return what the emulator of a state folder says about itself, or None if none lives there."""
    try:
        record = EmulatorRecord(**json.loads((state_dir / RECORD_NAME).read_text()))
    except FileNotFoundError:
        return None
    return record if started(record.pid) == record.started else None


def started(pid: int) -> int:
    """Return when a process started, in the kernel's ticks since boot; 0 if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def start_process(state_dir: Path, options: list[str], stdin: int) -> subprocess.Popen[bytes]:
    """Start `serve` for a state folder, its output going to emulator.log there.

    It gets a session of its own: Ctrl-C in a terminal means its starter, who then stops it in order.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state_dir / "emulator.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tpu.emulator", "serve", "--state", str(state_dir), *options],
            stdout=log,
            stderr=log,
            stdin=stdin,
            start_new_session=True,
        )


def wait_until_ready(process: subprocess.Popen[bytes], state_dir: Path) -> EmulatorRecord:
    """Wait until the emulator answers.

    Raises:
        EmulatorFailed: it ended, or took too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        ended = process.poll() is not None
        record = read_record(state_dir)
        if record is not None and record.pid == process.pid:
            return record
        if ended or time.monotonic() > deadline:
            how = (
                f"ended with {process.returncode}" if ended else f"is not ready after {_START_SECONDS:.0f} s"
            )
            raise EmulatorFailed(f"the emulator {how}; its log ends:\n{log_tail(state_dir)}")
        time.sleep(_POLL_SECONDS)


def wait_until_gone(record: EmulatorRecord, state_dir: Path) -> None:
    """Wait until neither an emulator lives, nor its guardian, nor anything that it started.

    Raises:
        EmulatorFailed: one still does after 20 s.
    """
    deadline = time.monotonic() + _STOP_SECONDS
    while left := remaining(record):
        if time.monotonic() > deadline:
            raise EmulatorFailed(
                f"processes {left} of the emulator live on after {_STOP_SECONDS:.0f} s; its log ends:\n"
                f"{log_tail(state_dir)}"
            )
        time.sleep(_POLL_SECONDS)


def remaining(record: EmulatorRecord) -> list[int]:
    """Return the pids of what lives of an emulator: itself, its guardian, and all that it started."""
    marked = marked_processes(f"TPU_EMULATOR_ID={record.emulator_id}")
    own = [record.pid] if started(record.pid) == record.started else []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The guardian is known by its arguments: its pid may have gone to somebody else meanwhile.
        arguments = Path(f"/proc/{record.guardian_pid}/cmdline").read_bytes()
        own += [record.guardian_pid] if record.emulator_id.encode() in arguments else []
    return own + [process.pid for process in marked if process.alive]


def log_tail(state_dir: Path, lines: int = 30) -> str:
    try:
        text = (state_dir / "emulator.log").read_text(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:])


class Emulator(ControlClient):
    """A running emulator. Its `env` holds the variables that lead every part of us to it.

    `state_dir` keeps its files (a temporary folder if None, removed at the end); `host_threads` is the
    number of threads, and cores, of each emulated host. With `speed` its hosts are simulated, by a clock that
    runs so much faster. It also ends when the process that made it does.
    """

    def __init__(
        self, state_dir: Path | str | None = None, host_threads: int = 1, speed: float | None = None
    ) -> None:
        self._temporary = state_dir is None
        self.state_dir = Path(state_dir or tempfile.mkdtemp(prefix="tpu-emulator-")).absolute()
        options = ["--host-threads", str(host_threads), "--until-stdin-closes"]
        if self._temporary:
            options.append("--temporary")
        if speed is not None:
            options += ["--simulated", "--speed", str(speed)]
        # Our end of this pipe closes when we die, whatever way; the emulator ends itself then.
        self._process = start_process(self.state_dir, options, stdin=subprocess.PIPE)
        try:
            self.record = wait_until_ready(self._process, self.state_dir)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.env = dict(self.record.env)
        super().__init__(self.record.control, self.record.key)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Emulator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it and return when none of its processes is left. Once is enough; twice does no harm.

        Raises:
            EmulatorFailed: something of it lives on.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its guardian clears up after it
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        wait_until_gone(self.record, self.state_dir)
        if self._temporary:
            shutil.rmtree(self.state_dir, ignore_errors=True)
