"""What is said of a schedule that does not fit the run."""

from __future__ import annotations

from typing import Any

import pytest

from flows.arguments import describe
from tpu.runs.config import parse_run_config


@pytest.mark.parametrize(
    ("steps", "optimizer", "words"),
    [
        (1000, {}, None),
        (200, {"schedule": "constant"}, None),
        (200, {}, "at the last step, 200, the learning rate still warms up (until step 500)"),
        (500, {"schedule": "cosine"}, "still warms up (until step 500)"),
        (501, {}, "at the last step, 501, the learning rate has come down only in part"),
        (200, {"warmup_fraction": 0.1}, "set training.schedule_steps=200"),
        (1200, {}, "from there to the last step, 1200, the learning rate stays where it ended"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_noted_in_the_dry_run(
    steps: int, optimizer: dict[str, Any], words: str | None
):
    training = {"workload": {"kind": "icl"}, "optimizer": optimizer, "schedule_steps": 1000}
    run = parse_run_config({"name": "x", "steps": steps, "training": training})
    notes = [line for line in describe(run).splitlines() if line.startswith("note")]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]
