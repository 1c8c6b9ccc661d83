"""The promise of the same bits once with the built-in JAX trainer, over two hosts."""

from __future__ import annotations

from typing import Any

from tests.scenarios.conftest import Lab
from tpu.runs.config import RunConfig, parse_run_config


def tiny_text_model(name: str, **values: Any) -> RunConfig:
    return parse_run_config(
        {
            "name": name,
            "training": {
                "workload": {
                    "kind": "bytelm",
                    "context": 16,
                    "batch": 8,
                    "model": {"layers": 1, "width": 16, "heads": 2},
                },
                "schedule_steps": 400,
                "steps_per_call": 10,
                "log_every": 10,
            },
            "steps": 400,
            "checkpoints": {"every": 40},
            "slice": {"accelerator_type": "v4-16"},
            "evaluate": "never",
        }
        | values
    )


async def test_a_jax_training_on_two_hosts_keeps_its_bits(lab: Lab):
    undisturbed, preempted = (
        tiny_text_model("jax-undisturbed"),
        tiny_text_model("jax-preempted", checkpoints={"every": 30}),
    )
    await lab.train(undisturbed)
    async with lab.training(preempted) as task:
        await lab.until_step(preempted.name, 30, task)
        await lab.preempt(notice=False)
    assert lab.verdicts(preempted.name) == ["preempted", "finished"]
    assert lab.digest(preempted.name) == lab.digest(undisturbed.name)
    assert lab.losses(preempted.name) == lab.losses(undisturbed.name)
