"""A gate that a test holds before a step of a program: however slow the machine is, it is still there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "NUMPY_GATE"


class Gate:
    """No step from `before` on is made until the test moves or opens it; for runs with these `variables`."""

    def __init__(self, file: Path, before: int) -> None:
        self._file = file
        self.variables = {VARIABLE: str(file)}
        self.move(before)

    def move(self, before: int) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(str(before))
        part.replace(self._file)

    def open(self) -> None:
        self._file.unlink()


def pass_gate(step: int) -> None:
    """In the program: return once `step` may be made."""
    if (file := os.environ.get(VARIABLE)) is None:
        return
    with contextlib.suppress(FileNotFoundError):  # it is open
        while step >= int(Path(file).read_text()):
            time.sleep(0.02)  # the test is another process: there is nothing to be told by
