"""The built-in workload cut into units: the same bits for any number of members, and after a loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from tests.elastic.conftest import Lab
from tests.elastic.jax_program import TRAINING, make
from tpu.elastic.member import Hooks, Settings, take_part
from tpu.elastic.program import state_hash
from tpu.train.jax_units import JaxProgram
from tpu.train.workloads import Configuration, make_workload

UNITS, STEPS = 4, 4


@pytest.fixture(scope="module")
def program() -> JaxProgram:
    return make(UNITS)


@pytest.mark.slow  # compiles the training; members of NumPy hold the same in the suite
def test_the_built_in_training_has_the_same_bits_with_one_and_three_members(
    lab: Lab, program: JaxProgram
) -> None:
    """Members in threads share the compiled program; what each of them says goes through sockets all the same."""

    def train(count: int) -> set[Any]:
        members, _ = lab.open(units=UNITS, last_step=STEPS, expect=count, silent_s=30)

        def one(number: int) -> tuple[str, tuple[float, ...]]:
            losses = []
            settings = Settings(
                slice=f"s{number}",
                key="a-key",
                last_step=STEPS,
                coordinator=lambda: ("127.0.0.1", int((members.folder / "port").read_text())),
            )
            hooks = Hooks(applied=lambda step, state, mean: losses.append(float(mean[-1])))
            state = take_part(program, program.initial(), 0, settings, hooks)
            return state_hash(program.arrays(state)), tuple(losses)

        with ThreadPoolExecutor(count) as threads:
            return set(threads.map(one, range(count)))

    alone = train(1)
    assert len(alone) == 1
    assert train(3) == alone


@pytest.mark.slow  # compiles the main job as well
def test_the_units_of_a_step_make_up_the_batch_of_the_main_job(program: JaxProgram) -> None:
    workload = make_workload(Configuration(TRAINING, None))
    state = program.initial()
    key = jax.random.fold_in(jax.random.key(TRAINING.seed), 3)
    data = jax.device_put(workload.load_data())
    loss = jax.jit(workload.loss)(state["params"], jax.jit(workload.batch)(data, key))  # type: ignore[arg-type]
    parts = [program.gradient(state, 3, unit)[-1] for unit in range(UNITS)]
    np.testing.assert_allclose(np.mean(parts), loss, rtol=1e-5)
    assert len({float(part) for part in parts}) == UNITS


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 32 cannot be cut into 5 units"):
        make(5)


@pytest.mark.slow  # three processes that compile; threads show the same bits above, NumPy the same deaths
def test_the_built_in_training_has_the_same_bits_when_a_member_is_killed(lab: Lab) -> None:
    told = {"units": UNITS, "steps": STEPS, "program": "jax"}
    results = []
    for slices, fault in ((1, None), (2, {"slice": "s1", "phase": "computing", "step": 3, "after": 1})):
        members, _ = lab.open(units=UNITS, last_step=STEPS, expect=slices, reconnect_s=0.5)
        for number in range(slices):
            members.start(f"s{number}", **told, fault=fault)
        members.wait(300)
        results.append(members.result())
    assert results[0] == results[1]
