"""The Bayes-optimal predictors, against a plain computation and against published numbers."""

import numpy as np
import pytest

from tpu.train.baselines import dmmse_predictions, ridge_predictions
from tpu.train.evaluation import icl_baselines
from tpu.train.icl import pretraining_tasks
from tpu.train.settings import Icl

D, K = 3, 6


@pytest.fixture
def examples():
    random = np.random.default_rng(0)
    x = random.standard_normal((2, K, D)).astype(np.float32)
    w = random.standard_normal((2, D)).astype(np.float32)
    y = np.einsum("bkd,bd->bk", x, w) + 0.5 * random.standard_normal((2, K)).astype(np.float32)
    return x, y


def test_ridge_is_the_regularised_solution_of_every_prefix(examples):
    x, y = examples
    found = ridge_predictions(x, y, 0.25)
    for b in range(2):
        for k in range(K):
            before, labels = x[b, :k].astype(float), y[b, :k].astype(float)
            w = np.linalg.solve(before.T @ before + 0.25 * np.eye(D), before.T @ labels)
            assert found[b, k] == pytest.approx(w @ x[b, k], abs=1e-4)


def test_ridge_first_predicts_zero(examples):
    assert not np.asarray(ridge_predictions(*examples, 0.25))[:, 0].any()


def test_dmmse_is_the_posterior_mean_of_every_prefix(examples):
    x, y = examples
    tasks = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)
    found = dmmse_predictions(x, y, tasks, 0.25)
    for b in range(2):
        for k in range(K):
            errors = ((y[b, :k, None] - x[b, :k].astype(float) @ tasks.T) ** 2).sum(0)
            weights = np.exp(-errors / 0.5)
            assert found[b, k] == pytest.approx(weights @ tasks @ x[b, k] / weights.sum(), abs=1e-4)


def test_dmmse_first_predicts_the_mean_task(examples):
    x, y = examples
    tasks = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)
    assert np.asarray(dmmse_predictions(x, y, tasks, 0.25))[:, 0] == pytest.approx(
        x[:, 0] @ tasks.mean(0), abs=1e-5
    )


def test_dmmse_stays_finite_where_every_task_is_next_to_impossible(examples):
    x, y = examples
    tasks = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)
    found = np.asarray(dmmse_predictions(x, y + 100, tasks, 1e-4))
    assert np.isfinite(found).all()


def test_ridge_stays_finite_without_noise_to_speak_of(examples):
    assert np.isfinite(np.asarray(ridge_predictions(*examples, 1e-6))).all()


@pytest.mark.parametrize(
    ("tasks", "pretraining", "new", "distance"),
    [
        (1, 0.000, 2.079, 1.735),
        (2**6, 0.150, 0.863, 0.520),
        pytest.param(2**10, 0.227, 0.605, 0.262, marks=pytest.mark.slow),
    ],
)
def test_baselines_agree_with_known_values(tasks, pretraining, new, distance):
    """D=8, K=16, σ²=0.25: mean over several draws of the tasks, of Monte Carlo over sequences."""
    settings = Icl(dimensions=8, examples=16, noise_variance=0.25, tasks=tasks)
    draws = 48 if tasks == 1 else 4
    found = [
        icl_baselines(
            settings, pretraining_tasks(tasks, 8, seed), seed, sequences=256 if tasks == 1 else 1024
        )
        for seed in range(draws)
    ]

    def mean(kind, name):
        return np.mean([one[kind][name] for one in found])

    # One task is the mean of nothing else: its size |w|²/D varies by 0.5 from draw to draw.
    tolerance = 0.2 if tasks == 1 else 0.03
    assert mean("new", "ridge_error") == pytest.approx(0.345, abs=0.015)
    assert mean("pretraining", "dmmse_error") == pytest.approx(pretraining, abs=0.015)
    assert mean("new", "dmmse_error") == pytest.approx(new, abs=tolerance)
    assert mean("new", "dmmse_to_ridge") == pytest.approx(distance, abs=tolerance)
    # Ridge is the posterior mean for new tasks, so its error is independent of any other predictor's.
    assert mean("new", "dmmse_error") == pytest.approx(
        mean("new", "ridge_error") + mean("new", "dmmse_to_ridge"), abs=0.02
    )
