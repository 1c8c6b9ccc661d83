"""Whether runs are driven by processes that live, as far as the bucket shows it to somebody who watches for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from tpu.runs.controller import MalformedController, observe
from tpu.runs.record import MalformedRecord, RunNotFound, load_record, run_directory
from tpu.slices.reaper import Driver


class Drivers:
    """Whether runs are driven, by how their controllers beat while we watch."""

    def __init__(self, bucket: str, ttl_s: float, trouble: Callable[[str], None]) -> None:
        self.undecided: set[str] = set()
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._trouble = trouble
        self._first: dict[str, tuple[float, int]] = {}
        self._known: dict[str, Driver] = {}

    async def look(self, runs: Collection[str], monotonic: float) -> dict[str, Driver]:
        """Look at runs once more, at a monotonic time; `undecided` are those that have to be watched for longer."""
        self.undecided = set()
        for run in sorted(runs - self._known.keys()):
            try:
                seen = await asyncio.to_thread(observe, run_directory(self._bucket, run))
            except MalformedController as error:
                self._trouble(f"run {run}: {error}")
                self._known[run] = Driver.ALIVE  # nobody can say that it is not
                continue
            if seen is None:
                known = await asyncio.to_thread(_exists, self._bucket, run)
                self._known[run] = Driver.SILENT if known else Driver.NONE
                continue
            since, generation = self._first.setdefault(run, (monotonic, seen[1]))
            if not seen[0].drives:
                self._known[run] = Driver.SILENT
            elif seen[1] != generation:
                self._known[run] = Driver.ALIVE
            elif monotonic - since >= self._ttl_s:
                self._known[run] = Driver.SILENT
            else:
                self.undecided.add(run)
        # Until it is decided a driver counts as living.
        return {run: self._known.get(run, Driver.ALIVE) for run in runs}

    async def moved(self, run: str) -> bool:
        """Whether a driver that was found silent has stirred, or another one has taken its place."""
        try:
            seen = await asyncio.to_thread(observe, run_directory(self._bucket, run))
        except MalformedController:
            return True
        return seen is not None and seen[1] != self._first.get(run, (0.0, -1))[1]


def _exists(bucket: str, run: str) -> bool:
    try:
        load_record(run_directory(bucket, run))
    except RunNotFound:
        return False
    except MalformedRecord:  # there is one, whatever it says
        pass
    return True
