"""A run at Weights & Biases: one, by its id, however often the run here is preempted or its flow is killed.

Weights & Biases drops steps that come again, so what is logged follows commits and goes on behind the last step that is
there: in the local records, or, online, at Weights & Biases itself. Each process leaves a record in a numbered folder
of its own: the name that Weights & Biases gives it is the second in which it began, and two may begin in one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu.checkpoint import files, objects
from tpu.runs.config import Wandb
from tpu.runs.record import RunRecord
from tpu.runs.sink import numbers_of
from tpu.runtime.wandb_record import RecordLog, history_of, is_exit

# An upload that takes longer than this at the end is given up: what is missing there is handed on by the next start.
FINISH_S = 90.0
LOOK_S = 0.05


def wandb_id(run_dir: str, record: RunRecord) -> str:
    """The id of a run at Weights & Biases; a run of the same name that is made anew has another one."""
    return hashlib.sha256(f"{run_dir} {record.created}".encode()).hexdigest()[:16]


class WandbRun:
    """Writes to one run; offline, unless there is a key."""

    def __init__(self, run_dir: str, record: RunRecord, settings: Wandb, key: str | None, home: Path) -> None:
        """`home` is the folder of this machine under which records are kept."""
        self._run_dir = run_dir
        self._record = record
        self._settings = settings
        self._key = key
        self.id = wandb_id(run_dir, record)
        self._folder = home / "wandb" / self.id
        self._run: Any = None

    def last(self) -> int:
        """The last step that the records here have, and those in the bucket; online, Weights & Biases is asked, too."""
        if not self._records():
            self._fetch()
        last = max((int(row.get("_step", 0)) for row in self.rows()), default=0)
        if self._key is not None:
            self._open()
            last = max(last, self._run.starting_step - 1)
        return last

    def rows(self) -> Iterator[dict[str, Any]]:
        """All that the records of this machine hold, in the order of their beginning."""
        for file in self._records():
            for record in RecordLog(file).new():
                yield from map(dict, history_of(record))

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self._open()
        for row in rows:
            self._run.log(numbers_of(row), step=row["step"], commit=True)

    def close(self, ended_well: bool) -> None:
        """End what this process writes; offline, the record is put into the bucket, for `wandb sync`."""
        if self._run is None:
            return
        written = Path(self._run.settings.sync_file)
        self._run.finish(exit_code=0 if ended_well else 1)
        self._run = None
        if self._key is None:
            _wait_for_exit(written)
            for file in self._records():
                number, _, folder, name = file.parts[-4:]
                files.write(f"{self._run_dir}/wandb/{number}/{folder}/{name}", file.read_bytes())

    def _records(self) -> list[Path]:
        return sorted(self._folder.glob(f"*/wandb/*run-*-{self.id}/run-{self.id}.wandb"))

    def _fetch(self) -> None:
        """Another machine has carried the run before: what it left says how far it came."""
        for url in objects.listing(f"{self._run_dir}/wandb"):
            number, folder, name = url.split("/")[-3:]
            if name == f"run-{self.id}.wandb":
                target = self._folder / number / "wandb" / folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.read(url))

    def _open(self) -> None:
        if self._run is not None:
            return
        import wandb  # slow to import, and wanted by few

        folder = self._folder / f"{len(self._records()) + 1:04}"
        folder.mkdir(parents=True, exist_ok=True)
        config = self._record.config
        settings = wandb.Settings(
            mode="offline" if self._key is None else "online",
            api_key=self._key,
            silent=True,
            console="off",  # the flow's output is not the program's
            disable_git=True,
            x_disable_stats=True,  # nor is its machine the program's
            x_disable_meta=True,
            x_disable_machine_info=True,
            disable_code=True,
            finish_timeout=FINISH_S,
        )
        self._run = wandb.init(
            project=self._settings.project, entity=self._settings.entity, id=self.id, name=config.name,
            config=config.model_dump(mode="json", exclude={"secrets", "tracking"}), dir=folder,
            resume="allow" if self._key is not None else None, reinit="create_new", settings=settings,
        )  # fmt: skip


def _wait_for_exit(file: Path) -> None:
    """Offline, `finish` returns while another process still writes the end of the record."""
    log, until = RecordLog(file), time.monotonic() + FINISH_S
    while not any(map(is_exit, log.new())) and time.monotonic() < until:
        time.sleep(LOOK_S)  # there is nothing to be told by
