"""The promise: the same parameters and losses to the last bit, whatever was preempted and wherever it was cut."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.scenarios.conftest import Lab
from tpu.runs.config import RunConfig


async def train_preempted(lab: Lab, run: RunConfig, count: int) -> None:
    """Train with `count` preemptions, each a random moment after a start, half of them with notice."""
    chance, done = random.Random(count), 0
    async with lab.training(run) as task:
        while done < count:
            await lab.until(
                lambda: lab.fence(run.name).attempt > done or task.done(),  # noqa: B023  awaited here
                f"attempt {done + 1} of {run.name}",
            )
            await asyncio.sleep(chance.uniform(0.5, 2.0))  # the random moment is the point
            nodes = [node for node in lab.ready_nodes() if node.startswith(f"relay-{run.name}-")]
            if task.done():
                break
            if nodes:
                done += 1
                await asyncio.to_thread(lab.emulator.preempt, nodes[0], notice=chance.random() < 0.5)
    assert done > count // 2
    verdicts = lab.verdicts(run.name)
    # One that strikes while the last process leaves changes nothing.
    assert verdicts[-1] == "finished"
    assert verdicts[:-1] in (["preempted"] * done, ["preempted"] * (done - 1))


@pytest.mark.parametrize(
    ("slice_type", "counts"),
    [
        ("v4-16", (2,)),
        pytest.param("v4-16", (1, 3), marks=pytest.mark.slow),
        pytest.param("v4-16", (7,), marks=pytest.mark.slow),
        pytest.param("v4-8", (1, 3, 7), marks=pytest.mark.slow),
    ],
)
async def test_parameters_and_losses_do_not_depend_on_preemptions_or_segments(
    lab: Lab, slice_type: str, counts: tuple[int, ...]
):
    def run(name: str, every: int = 40) -> RunConfig:
        return lab.numpy_run(
            name, steps=120, every=every, step_s=0.04, slice={"accelerator_type": slice_type}
        )

    # All at once: they wait for others' answers most of the time, and who else trains counts for nothing either.
    await asyncio.gather(
        lab.train(run("undisturbed")),
        lab.train(run("other-segments", every=17)),
        *(train_preempted(lab, run(f"preempted-{count}"), count) for count in counts),
    )
    lab.assert_as_undisturbed(run("undisturbed"))
    bits, losses = lab.digest("undisturbed"), lab.losses("undisturbed")
    for name in ("other-segments", *(f"preempted-{count}" for count in counts)):
        assert (lab.digest(name), lab.losses(name)) == (bits, losses), name
