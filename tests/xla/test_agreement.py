"""The same numbers as the JAX trainer: same initial parameters and batches give the same losses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.xla.conftest import TINY_ICL
from tpu.checkpoint.tree import leaves_of
from tpu.train import xla_device
from tpu.train.settings import Training
from tpu.train.step import initial_state, updated
from tpu.train.torch_workloads import make_model, make_torch_workload
from tpu.train.workloads import Configuration, make_workload
from tpu.train.xla_step import State, initial_arrays, train_step

BYTELM = TINY_ICL | {
    "workload": {
        "kind": "bytelm",
        "text": ["python:this"],
        "context": 16,
        "batch": 4,
        "model": {"layers": 1, "width": 8, "heads": 2},
    }
}


def jax_steps(training: Training, batches: list[Any]) -> list[float]:
    """Losses of the JAX trainer's loss, optimizer and schedule on given batches."""
    from tpu.train import optimizer

    workload = make_workload(Configuration(training, None))
    settings = training.optimizer
    update = optimizer.direction(settings.clip_norm, settings.weight_decay or None)
    rate = optimizer.rate_of(settings, training.schedule_steps)

    @jax.jit
    def step(state, batch, number):
        loss, gradients = jax.value_and_grad(workload.loss)(state["params"], batch)
        now = optimizer.learning_rate(settings.schedule, rate, number)
        return updated(state, gradients, update, now), loss

    state, losses = initial_state(workload), []
    for number, batch in enumerate(batches):
        state, loss = step(state, batch, np.int32(number))
        losses.append(float(loss))
    return losses


def jax_batches(training: Training, count: int) -> list[Any]:
    workload = make_workload(Configuration(training, None))
    data = jax.tree.map(jax.numpy.asarray, workload.load_data())
    draw = jax.jit(lambda step: workload.batch(data, jax.random.fold_in(jax.random.key(training.seed), step)))
    return [jax.device_get(draw(step)) for step in range(count)]


@pytest.mark.parametrize("values", [TINY_ICL, BYTELM], ids=["icl", "bytelm"])
def test_a_hundred_steps_on_the_batches_of_the_jax_trainer_have_its_losses(values: dict[str, Any]):
    training = Training.model_validate(values | {"schedule_steps": 100})
    batches = jax_batches(training, 100)
    expected = jax_steps(training, batches)

    workload = make_torch_workload(training, None)
    model = make_model(training, workload)
    devices = xla_device.open_devices(1)
    arrays = initial_arrays(model)
    names = list(arrays)

    def step(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        state = State.of_named(dict(zip(names, tensors, strict=False)))
        state, loss, _ = train_step(training, workload, model, state, tuple(tensors[len(names) :]))
        return [*(state.named()[name] for name in names), loss]

    def on_device(batch: Any) -> list[torch.Tensor]:
        parts = [batch.x, batch.y] if hasattr(batch, "x") else [batch]
        return list(devices.place({str(i): part for i, part in enumerate(parts)}).values())

    state = list(devices.place(arrays).values())
    graph = xla_device.StepGraph(devices, step, [*state, *on_device(batches[0])])
    found = []
    for batch in batches:
        *state, loss = graph([*state, *on_device(batch)])
        found.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("values", [TINY_ICL, BYTELM], ids=["icl", "bytelm"])
def test_the_state_has_the_names_shapes_dtypes_and_initial_numbers_of_the_jax_trainer(values: dict[str, Any]):
    training = Training.model_validate(values)
    theirs = leaves_of(initial_state(make_workload(Configuration(training, None))))
    ours = initial_arrays(make_model(training, make_torch_workload(training, None)))
    assert sorted(ours) == sorted(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        assert ours[name].shape == array.shape, name
        assert ours[name].tobytes() == np.asarray(array).tobytes(), name
