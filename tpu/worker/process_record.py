"""Which worker watches over which flow run of this machine: a file each, so that a restarted worker finds them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tpu.runs.controller import process_start


@dataclass(frozen=True)
class FlowRecord:
    """One flow run. `pid` and `started` are those of the worker that watches over it, `run` is what it trains.

    `claim` is the id of the state by which it was claimed for its processes here.
    """

    flow_run_id: str
    run: str | None
    pid: int
    started: str
    claim: str | None = None

    @classmethod
    def of_this_worker(cls, flow_run_id: str, run: str | None, claim: str | None) -> FlowRecord:
        return cls(flow_run_id, run, os.getpid(), process_start(os.getpid()), claim)

    @property
    def orphaned(self) -> bool:
        """Whether the worker that wrote it is dead."""
        return process_start(self.pid) != self.started


class FlowFolder:
    """Files of one flow run under the worker's folder."""

    def __init__(self, pool_folder: Path, flow_run_id: str) -> None:
        self.path = pool_folder / flow_run_id
        self.output = self.path / "output.log"
        self.work = self.path / "work"
        self.scratch = self.path / "tmp"
        self.nothing_left = self.path / "nothing-left"

    def write(self, record: FlowRecord) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self.path / "record.part"
        part.write_text(json.dumps(asdict(record)))
        part.replace(self.path / "record.json")

    def read(self) -> FlowRecord | None:
        try:
            return FlowRecord(**json.loads((self.path / "record.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None  # not there, or being written or removed

    def secret_file(self, name: str, content: str) -> Path:
        """A file that its owner alone can read."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.path / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
        return path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def orphaned_records(pool_folder: Path) -> Iterator[FlowRecord]:
    """Flow runs whose worker is dead."""
    for path in sorted(pool_folder.glob("*/record.json")):
        record = FlowFolder(pool_folder, path.parent.name).read()
        if record is not None and record.orphaned:
            yield record
