"""Bits depend on seed and step, not on how a training is cut."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.train.programs import LocalRun, same_bits, tiny_icl
from tpu.train.mesh import slice_mesh
from tpu.train.step import initial_state, lower_program
from tpu.train.workloads import Configuration, make_workload


@pytest.fixture(scope="module")
def run():
    return LocalRun.compiled(tiny_icl())


@pytest.fixture(scope="module")
def undisturbed(run):
    return run.run([5, 5, 5])


def test_calls_of_any_length_give_the_same_bits(run, undisturbed):
    for counts in ([1] * 15, [5, 1, 1, 1, 1, 1, 5], [2, 3, 5, 4, 1]):
        state, losses = run.run(counts)
        assert same_bits((state, losses), undisturbed), counts


def test_a_resume_from_host_arrays_gives_the_same_bits(run, undisturbed):
    middle, first = run.run([5, 2])
    state, second = run.run([5, 3], start=7, state=middle)
    assert same_bits((state, np.concatenate([first, second])), undisturbed)


def test_a_step_counts_updates(run):
    state, _ = run.run([5, 2])
    assert int(state["optimizer"][1].count) == 7


def test_another_seed_gives_other_numbers_by_the_same_program(run, undisturbed):
    other = LocalRun(
        run.training.model_copy(update={"seed": 1}), run.program, run.shardings, run.data, run.first_state
    )
    _, losses = other.run([5, 5, 5])
    assert not np.isin(losses, undisturbed[1]).any()


def test_sharded_parameters_train_as_copies_do(undisturbed):
    sharded = LocalRun.compiled(tiny_icl(shard_parameters=True))
    state, losses = sharded.run([5, 5, 5])
    parts = jax.tree.leaves(sharded.shardings)
    assert any(not sharding.is_fully_replicated for sharding in parts)
    np.testing.assert_allclose(losses, undisturbed[1], rtol=1e-4)
    # Moments, not parameters: the gradient of a key's bias is 0 but for rounding, which Adam blows up.
    moments, expected = state["optimizer"][1].mu, undisturbed[0]["optimizer"][1].mu
    for one, other in zip(jax.tree.leaves(moments), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_the_batch_is_a_function_of_seed_and_step():
    workload = make_workload(Configuration(tiny_icl(), None))
    data = workload.load_data()

    def batch(seed, step):
        return workload.batch(data, jax.random.fold_in(jax.random.key(seed), step))

    assert same_bits(batch(3, 7), batch(3, 7))
    assert not same_bits(batch(3, 7), batch(3, 8))
    assert not same_bits(batch(3, 7), batch(4, 7))


def test_a_batch_that_the_devices_cannot_share_is_refused():
    training = tiny_icl()
    training = training.model_copy(update={"workload": training.workload.model_copy(update={"batch": 6})})
    workload = make_workload(Configuration(training, None))
    with pytest.raises(ValueError, match="a batch of 6 cannot be dealt out evenly to 4 devices"):
        lower_program(training, workload, slice_mesh(), initial_state(workload), workload.load_data())


def test_initial_parameters_are_a_function_of_the_seed():
    workload = make_workload(Configuration(tiny_icl(), None))
    assert same_bits(workload.draw_model(), workload.draw_model())
    assert not same_bits(workload.draw_model(), dataclasses.replace(workload, seed=1).draw_model())
