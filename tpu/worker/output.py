"""The output of a flow run, copied from its file to the worker's own: a pipe would break with the worker."""

from __future__ import annotations

import sys
from pathlib import Path

CHUNK_BYTES = 1 << 20


class Output:
    """What is added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def copy(self) -> None:
        """Write what is new to standard output."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return
        self._at += len(new)
        if new:
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
