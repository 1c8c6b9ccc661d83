"""What training teaches, seen by the evaluators."""

import pytest

from tests.train.programs import LocalRun
from tpu.checkpoint.tree import leaves_of
from tpu.runs.config import parse_run_config
from tpu.sweeps.figures import flat_figures, known_figures
from tpu.train.evaluate import ParametersDoNotFit, evaluate_arrays
from tpu.train.settings import Training
from tpu.train.workloads import Configuration


def trained(steps, **settings):
    """(configuration, arrays by name as in a checkpoint) of a small training."""
    training = Training.model_validate(
        {
            "steps_per_call": 20,
            "schedule_steps": steps,
            "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.1},
        }
        | settings
    )
    state, _ = LocalRun.compiled(training).run([20] * (steps // 20))
    return Configuration(training, None), leaves_of(state)


@pytest.fixture(scope="module")
def regression():
    workload = {
        "kind": "icl", "dimensions": 1, "examples": 8, "tasks": 4, "batch": 32,
        "model": {"layers": 2, "width": 16, "heads": 2},
    }  # fmt: skip
    return trained(600, workload=workload)


def test_a_trained_regression_lies_near_the_optimum(regression):
    found = evaluate_arrays(*regression)
    known, new = found["pretraining"], found["new"]
    assert known["model_error"] < 0.4 * known["zero_error"]
    assert known["dmmse_error"] < known["model_error"] < known["dmmse_error"] + 0.25
    assert known["delta_dmmse"] < 0.5 * known["model_error"]
    assert new["ridge_error"] < new["dmmse_error"]
    # What a sweep may be compared by is known before there is an evaluation.
    run = parse_run_config({"name": "a", "training": regression[0].training.model_dump()})
    assert set(flat_figures(found)) == set(known_figures(run) or ())
    # Square errors of the noisy labels are those of the clean ones and the noise.
    assert known["model_loss"] == pytest.approx(known["model_error"] + 0.25, abs=0.03)


def test_parameters_of_another_model_are_refused(regression):
    configuration, arrays = regression
    fewer = {name: array for name, array in arrays.items() if name != "params/positions"}
    with pytest.raises(
        ParametersDoNotFit, match=r"wants params/positions of shape \(16, 16\), which is missing"
    ):
        evaluate_arrays(configuration, fewer)


@pytest.mark.slow  # a whole training; the icl one is in the short form
def test_trained_bytes_need_fewer_bits_than_their_frequencies(tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{n} plus {n} is {n + n}. " for n in range(2000)))
    workload = {
        "kind": "bytelm", "text": [str(text)], "context": 16, "batch": 16,
        "model": {"layers": 1, "width": 16, "heads": 2},
    }  # fmt: skip
    found = evaluate_arrays(*trained(400, workload=workload))
    assert 3 < found["byte_frequency_bits_per_byte"] < 5
    assert found["bits_per_byte"] < 0.6 * found["byte_frequency_bits_per_byte"]
