"""The promise: the same parameters and losses to the last bit, whatever was preempted and wherever it was cut."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.scenarios.conftest import Lab


async def preempt_at_random_times(lab: Lab, name: str, count: int, task: asyncio.Task) -> int:
    """Preempt `count` slices, each a random moment after it has trained a little; returns how many it were."""
    chance = random.Random(count)
    for number in range(count):
        attempt = await lab.until(
            lambda seen=number: len(lab.events(name, "attempt-started")) > seen or task.done(),
            "an attempt",
            None,
        )
        assert attempt
        await asyncio.sleep(chance.uniform(0.5, 1.6))
        nodes = lab.ready_nodes()
        if task.done() or not nodes:
            return number
        await asyncio.to_thread(lab.emulator.preempt, nodes[0], notice=chance.random() < 0.5)
    return count


@pytest.mark.parametrize("slice_type", ["v4-8", "v4-16"])
async def test_parameters_and_losses_do_not_depend_on_preemptions_or_segments(lab: Lab, slice_type: str):
    def run(name: str, **values):
        return lab.numpy_run(
            name,
            steps=120,
            every=values.pop("every", 40),
            step_s=0.02,
            slice={"accelerator_type": slice_type},
            **values,
        )

    await lab.train(run("undisturbed"))
    bits, losses = lab.digest("undisturbed"), lab.losses("undisturbed")
    assert len(losses) == 120
    await lab.train(run("other-segments", every=17))
    assert (lab.digest("other-segments"), lab.losses("other-segments")) == (bits, losses)
    for count in (1, 3, 7):
        name = f"preempted-{count}"
        async with lab.training(run(name)) as task:
            done = await preempt_at_random_times(lab, name, count, task)
        assert lab.verdicts(name).count("preempted") >= min(done, 1)
        assert (lab.digest(name), lab.losses(name)) == (bits, losses)
