"""The `relay` command as a test types it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from flows.command import main


@dataclass(frozen=True)
class Answer:
    """What a command printed and exited with."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of an error."""
        assert self.err.startswith("relay: "), self
        assert len(self.err.splitlines()) == 1, self
        return self.err.removeprefix("relay: ").strip()


@dataclass(frozen=True)
class Terminal:
    """Calls the entry point in this process, which spares a second of imports each time."""

    capture: pytest.CaptureFixture[str]

    def relay(self, *words: str) -> Answer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["relay", *words])
            self.capture.readouterr()
            try:
                main()
                code: object = 0
            except SystemExit as end:
                code = end.code
            printed = self.capture.readouterr()
        assert isinstance(code, int) or code is None, code
        return Answer(code or 0, printed.out, printed.err)


def relay_process(*words: str, **environment: str) -> Answer:
    """The command as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.command", *words],
        env=os.environ | environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)
