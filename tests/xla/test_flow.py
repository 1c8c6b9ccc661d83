"""The main job with framework xla: the real flow on the emulator, preempted, ends with the same bits."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.scenarios.conftest import Lab, lab, prefect_environment
from tests.xla.conftest import TINY_ICL
from tpu.checkpoint.verify import verify_run
from tpu.runs.config import RunConfig, parse_run_config
from tpu.runtime.metrics import read_events

__all__ = ["lab", "prefect_environment"]  # fixtures


def xla_run(name: str) -> RunConfig:
    """Six segments of a second or two on an emulated v4-8: four devices, data parallel by SPMD."""
    training = TINY_ICL | {"schedule_steps": 1800, "steps_per_call": 10, "log_every": 10}
    return parse_run_config(
        {
            "name": name,
            "framework": "xla",
            "training": training,
            "steps": 1800,
            "checkpoints": {"every": 300},
            "slice": {"accelerator_type": "v4-8"},
            "evaluate": "final",
        }
    )


async def test_the_same_bits_with_0_1_and_3_preemptions(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_RELAY_HOST_PYTHON_XLA", sys.executable)
    monkeypatch.setattr("tests.scenarios.conftest.WAIT_S", 240.0)
    await lab.train(xla_run("xla-0"))
    bits, losses = lab.digest("xla-0"), lab.losses("xla-0")
    assert [step for step, _ in losses] == list(range(10, 1801, 10))
    assert losses[-1][1] < losses[0][1]
    for count in (1, 3):
        name = f"xla-{count}"
        async with lab.training(xla_run(name)) as task:
            for number in range(count):
                # A notice makes the last attempt reach further than its segment: what counts is a commit of this one.
                await lab.until(
                    lambda attempt=number + 1, name=name: (
                        (newest := lab.fence(name).newest()) and newest.attempt == attempt
                    ),
                    "a commit of the attempt",
                    task,
                )
                await asyncio.to_thread(lab.emulator.preempt, lab.ready_nodes()[0], notice=number % 2 == 1)
                await lab.until(
                    lambda seen=number, name=name: len(lab.verdicts(name)) > seen,
                    "the end of the attempt",
                    task,
                )
        assert lab.verdicts(name) == ["preempted"] * count + ["finished"]
        assert (lab.digest(name), lab.losses(name)) == (bits, losses)
        assert all(verdict.whole for verdict in verify_run(lab.directory(name)))
        told = [event for _, event in read_events(lab.directory(name)) if event["event"] == "graphs"]
        assert len(told) >= count + 1
        assert all(event["recompiled"] == 0 and event["fallbacks"] == {} for event in told)
