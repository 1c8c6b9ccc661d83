"""What the bucket knows of a run, gathered for its report."""

from __future__ import annotations

import sys
import time

import pytest

from tests.runs.conftest import Track
from tpu.runs.driver import AttemptEnded
from tpu.runs.event_log import load_events
from tpu.runs.figures import collect
from tpu.runs.record import load_record
from tpu.runs.report import to_markdown


@pytest.mark.parametrize("threads", ["$RELAY_ATTEMPT", "1"])
async def test_C9_a_run_that_went_on_where_other_bits_come_out_is_marked_in_its_report(
    track: Track, threads: str
):
    name = "mixed" if threads != "1" else "of-a-piece"
    program = f"OMP_NUM_THREADS={threads} exec {sys.executable} -m tests.trainers.numpy_trainer"
    failure = {"NUMPY_FAIL": "exception@3", "NUMPY_FAIL_ATTEMPT": "1"}
    run = track.numpy_run(
        name, steps=4, every=2, command=["/bin/sh", "-c", program], variables=failure, allow_mixed=True
    )
    async with track.driving(run) as driver:
        await track.segment(driver, 2)
        with pytest.raises(AttemptEnded, match="on demand"):
            await track.segment(driver, 4)
        await track.segment(driver, 4)
        await driver.clean_up("the test is done with it")
    run_dir = track.directory(name)
    report = collect(load_record(run_dir), run_dir, load_events(run_dir), None, time.time())
    assert report.mixed == (name == "mixed")
    assert ("| mixed |" in to_markdown(report, {})) == report.mixed
