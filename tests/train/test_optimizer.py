"""The learning rate by step, and what the optimizer does with a gradient."""

import numpy as np
import pytest

from tpu.train.optimizer import direction, initial_state, learning_rate, rate_of
from tpu.train.settings import Optimizer


@pytest.mark.parametrize(
    ("schedule", "warm_up", "step", "expected"),
    [
        ("constant", 0.5, 0, 1.0),
        ("constant", 0.5, 1000, 1.0),
        ("triangle", 0.5, 0, 0.02),
        ("triangle", 0.5, 49, 1.0),
        ("triangle", 0.5, 74, 0.5),
        ("triangle", 0.5, 99, 0.0),
        ("triangle", 0.5, 5000, 0.0),
        ("triangle", 0.0, 49, 0.5),
        ("triangle", 1.0, 99, 1.0),
        ("cosine", 0.1, 9, 1.0),
        ("cosine", 0.1, 54, 0.5),
        ("cosine", 0.1, 99, 0.0),
    ],
)
def test_learning_rate(schedule, warm_up, step, expected):
    settings = Optimizer(learning_rate=2.0, schedule=schedule, warmup_fraction=warm_up)
    assert float(learning_rate(settings.schedule, rate_of(settings, 100), np.int32(step))) == pytest.approx(
        2 * expected, abs=1e-6
    )


def test_initial_state_is_that_of_optax():
    parameters = {"w": np.ones((2, 3), np.float32)}
    ours, theirs = initial_state(parameters), direction(1.0, 0.1).init(parameters)
    np.testing.assert_equal(ours, theirs)


def test_clipping_and_decay_are_optional():
    plain = direction(None, None)
    both = direction(1e-6, 0.5)
    w, g = {"w": np.full(3, 2.0, np.float32)}, {"w": np.ones(3, np.float32)}
    step, _ = plain.update(g, plain.init(w), w)
    decayed, _ = both.update(g, both.init(w), w)
    assert np.asarray(step["w"]) == pytest.approx(1.0, rel=1e-3)
    assert np.asarray(decayed["w"]) == pytest.approx(2.0, rel=2e-2)
