"""What happens in a training process, one JSON line each, in a file that the supervisor follows."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class EventLog:
    """Appends events to a file, each flushed at once; without a path it writes nowhere.

    Several may append to one file: what a `member` of a pack says carries its name there.
    """

    def __init__(self, path: Path | None, member: str = "", clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._whose = {"member": member} if member else {}
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def write(self, event: str, /, **fields: object) -> Mapping[str, object]:
        """Write `{"t": now, "event": event, …}` and return it. `t` is in seconds since 1970."""
        record = {"t": round(self._clock(), 4), "event": event, **fields}
        if self._file is not None:
            line = json.dumps(record | self._whose) + "\n"
            self._append(line)
        return record

    def _append(self, line: str) -> None:
        try:
            with self._lock:
                if self._file is not None and not self._file.closed:
                    self._file.write(line)
                    self._file.flush()
        except OSError as error:  # a full disk of the host costs its events, never the training
            print(f"an event could not be written: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
