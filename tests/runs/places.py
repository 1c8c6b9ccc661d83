"""What metrics of a run are in the places that they are handed to, as these read them themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from tpu.checkpoint import files, objects
from tpu.runs.record import RunRecord
from tpu.runs.wandb_run import WandbRun


def on_tensorboard(run_dir: str) -> list[tuple[int, float]]:
    """Step and loss, as TensorBoard itself reads the files."""
    with tempfile.TemporaryDirectory() as folder:
        for url in objects.listing(f"{run_dir}/tensorboard"):
            (Path(folder) / url.rpartition("/")[2]).write_bytes(files.read(url))
        events = EventAccumulator(folder, {SCALARS: 0}).Reload()
        if "loss" not in events.Tags()[SCALARS]:
            return []
        return [(event.step, event.value) for event in events.Scalars("loss")]


def wandb_rows(run_dir: str, record: RunRecord, home: Path) -> list[tuple[int, float]]:
    """Step and loss in the records that Weights & Biases keeps on a machine."""
    wanted = record.config.tracking.wandb
    assert wanted is not None
    return [(row["_step"], row["loss"]) for row in WandbRun(run_dir, record, wanted, None, home).rows()]
