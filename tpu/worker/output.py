"""The output of a flow run, copied from its file to the worker's own: a pipe would break with the worker."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

CHUNK_BYTES = 1 << 20


class Output:
    """What is added to a file; how far it was copied stands beside it, so that the next worker goes on from there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = path.with_suffix(".copied")
        try:
            self._at = int(self._mark.read_text())
        except (FileNotFoundError, ValueError):
            self._at = 0

    def copy(self) -> None:
        """Write all that is new to standard output."""
        began = self._at
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            while new := file.read(CHUNK_BYTES):
                sys.stdout.write(new.decode(errors="replace"))
                self._at += len(new)
        if self._at != began:
            sys.stdout.flush()
            self._mark.write_text(str(self._at))
