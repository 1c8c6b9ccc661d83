"""Metrics as event files of TensorBoard in the bucket: `tensorboard --logdir gs://…/runs/NAME/tensorboard`.

An object cannot be appended to, so each commit adds a file with the steps since the one before. Its name is the step
behind which it begins and its label the last one in it: of two who write the same steps one is refused, and whoever
goes on begins where the last file ends.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu.checkpoint import objects
from tpu.runs.sink import numbers_of

# TensorBoard reads what has `tfevents` in its name, in the order of names.
_FILE = re.compile(r"/events\.out\.tfevents\.(\d{10})$")
_LAST = "last-step"


class TensorBoardFiles:
    """The event files of one run."""

    def __init__(self, run_dir: str) -> None:
        self._folder = f"{run_dir}/tensorboard"
        self._after = 0

    def last(self) -> int:
        """The last step that is in a file; 0 if there is none."""
        known = [int(one.labels[_LAST]) for one in objects.entries(self._folder) if _FILE.search(one.url)]
        self._after = max(known, default=0)
        return self._after

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows behind the last step; raises ObjectExists if somebody else has written them."""
        last = rows[-1]["step"]
        url = f"{self._folder}/events.out.tfevents.{self._after:010d}"
        objects.create_exclusive(url, _events(rows), {_LAST: str(last)})
        self._after = last

    def close(self, ended_well: bool) -> None:
        """Each file is whole already."""


def _events(rows: Sequence[dict[str, Any]]) -> bytes:
    from tensorboardX import SummaryWriter

    with tempfile.TemporaryDirectory(prefix="relay-tensorboard-") as folder:
        with SummaryWriter(folder) as writer:
            for row in rows:
                for name, value in numbers_of(row).items():
                    writer.add_scalar(name, value, row["step"], walltime=row.get("t"))
        (file,) = Path(folder).iterdir()
        return file.read_bytes()
