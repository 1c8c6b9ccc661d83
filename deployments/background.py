"""Programs in the background, each with a file that names its process and one with its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu.runs.controller import process_start

POLL_S = 0.1


@dataclass(frozen=True)
class Background:
    """One program, by the name of its files in `folder`."""

    folder: Path
    name: str

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def pid(self) -> int | None:
        """Its process, if that lives: a later process of the same number is another one."""
        try:
            known = json.loads(self._file.read_text())
            return known["pid"] if process_start(known["pid"]) == known["started"] != "" else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start it in a session of its own: Ctrl-C in a terminal is not meant for it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._file.write_text(json.dumps({"pid": process.pid, "started": process_start(process.pid)}))
        except BaseException:
            process.kill()  # nobody would find it again
            raise
        return process

    def stop(self, within_s: float) -> bool:
        """End it, by SIGKILL if it takes longer; whether it lived."""
        pid = self.pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + within_s
            while self.pid() is not None:
                if time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                time.sleep(POLL_S)  # polling another process: there is nothing to be told by
        self._file.unlink(missing_ok=True)
        return pid is not None

    def tail(self, lines: int = 20) -> str:
        """The end of its output."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""
