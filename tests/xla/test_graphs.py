"""What torch_xla is seen doing: one graph a step, XLA's own generator, a named line for each needless compilation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_xla

from tests.xla.conftest import CAUSES, TINY_ICL
from tpu.train import xla_device
from tpu.train.graph_guard import GraphGuard
from tpu.train.randomness import step_seeds
from tpu.train.settings import Training
from tpu.train.torch_workloads import draw_indices, make_model, make_torch_workload
from tpu.train.xla_step import initial_arrays, place_state, step_program


@pytest.fixture(scope="module")
def devices() -> xla_device.Devices:
    return xla_device.open_devices(1)


def test_a_step_is_one_execution_of_one_graph_and_the_hosts_generators_make_no_difference(devices):
    training = Training.model_validate(TINY_ICL)
    workload = make_torch_workload(training, None)
    model, data = make_model(training, workload), devices.place(workload.load_data())
    arrays = initial_arrays(model)
    state = place_state(devices, training, arrays)
    before = xla_device.graph_counts()
    program = step_program(training, workload, model, devices, state, data)
    assert program.draws

    def train(steps: int, host_seed: int, xla_seed: int) -> list[float]:
        named, losses = place_state(devices, training, arrays), []
        torch.manual_seed(host_seed)
        np.random.seed(host_seed)
        for step in range(steps):
            devices.seed(step_seeds(xla_seed, step).xla)
            *values, loss, _ = program([*named.values(), *data.values()])
            named = dict(zip(named, values, strict=True))
            losses.append(loss)
        return [loss.item() for loss in losses]

    first = train(10, host_seed=1, xla_seed=0)
    counts = xla_device.graph_counts()
    assert counts.compiled <= before.compiled + 2  # the step, and numbers put on the device
    assert train(10, host_seed=2, xla_seed=0) == first
    assert train(10, host_seed=1, xla_seed=1)[0] != first[0]
    after = xla_device.graph_counts()
    assert after.compiled == counts.compiled
    assert after.executed - counts.executed <= 20 + 2
    assert after.fallbacks == {}


def test_xlas_generator_draws_and_its_seed_is_all_that_counts(devices):
    def drawn(xla_seed: int, host_seed: int) -> list[np.ndarray]:
        devices.seed(xla_seed)
        torch.default_generator.manual_seed(host_seed)
        tensors = [
            torch.randn(64, 3, device=devices.torch),
            torch.rand(64, device=devices.torch),
            draw_indices(64, 10, devices.torch),
        ]
        torch_xla.sync()
        return [tensor.cpu().numpy() for tensor in tensors]

    once, again, host, other = drawn(5, 1), drawn(5, 1), drawn(5, 2), drawn(6, 1)
    for a, b, c, d in zip(once, again, host, other, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()
        assert a.tobytes() != d.tobytes()
    assert devices.random_state() != 5  # drawing moved it on
    assert once[2].min() >= 0
    assert once[2].max() < 10


def test_indices_are_drawn_evenly_and_beyond_what_one_float_can_name(devices):
    devices.seed(1)
    drawn = draw_indices(30_000, 10, devices.torch).cpu().numpy()
    counts = np.bincount(drawn, minlength=10)
    assert abs(counts - 3000).max() < 5 * 3000**0.5
    devices.seed(2)
    far = draw_indices(1000, 2**40, devices.torch).cpu().numpy()
    assert len(set(far.tolist())) == 1000
    assert abs((far % 2).mean() - 0.5) < 0.1


def test_a_recompilation_and_a_fallback_are_told_with_the_line(devices):
    told: list[str] = []
    guard = GraphGuard(xla_device.graph_counts, lambda: xla_device.last_cause(CAUSES), told.append)

    def of_length(count: int) -> None:
        doubled = torch.ones(count, device=devices.torch) * 2
        torch_xla.sync()
        assert doubled.shape == (count,)

    of_length(3)
    guard.warmed_up()
    of_length(3)
    assert not guard.look(1)
    of_length(4)
    assert guard.look(2)
    assert "test_graphs.py:" in told[-1]
    assert "of_length" in told[-1]
    torch.linalg.lstsq(torch.eye(2, device=devices.torch), torch.ones(2, 1, device=devices.torch))
    assert guard.look(3)
    assert "aten::linalg_lstsq" in told[-1]
