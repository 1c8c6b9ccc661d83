"""What others than its driver write into a run's history: a slice that the reaper deleted costs nothing any more."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tpu.checkpoint import files, objects

# Behind all events of the driver's term, before those of the next driver.
_NUMBER = "999999"


def note_from_outside(run_dir: str, key: str, time: float, kind: str, **detail: Any) -> None:
    """Write an event into the history of a run that nobody drives; the same `key` twice in a term is one event.

    A run without a history has none to be mended, and gets none. `time` is seconds since 1970.
    """
    events = files.names(f"{run_dir}/events")
    if not events:
        return
    term = max(url.rpartition("/")[2].partition("-")[0] for url in events)
    with contextlib.suppress(objects.ObjectExists):
        objects.create_exclusive(
            f"{run_dir}/events/{term}-{_NUMBER}-{key}.json",
            json.dumps({"time": time, "kind": kind, "detail": detail}).encode(),
        )
