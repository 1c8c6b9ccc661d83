"""Several trainings in one program: each with the numbers it would have alone, whatever happens to its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.programs import LocalRun, same_bits, tiny_icl
from tpu.train import pack_step
from tpu.train.mesh import place, replicated
from tpu.train.packs import Member, PackError, check_together, in_common
from tpu.train.settings import Training
from tpu.train.step import initial_state
from tpu.train.workloads import Configuration, make_workload


def with_numbers(seed: int, rate: float, tasks: int | None, **optimizer: Any) -> Training:
    training = tiny_icl(seed=seed, schedule_steps=20)
    settings = training.optimizer.model_copy(
        update={"learning_rate": rate, "schedule": "triangle"} | optimizer
    )
    workload = training.workload.model_copy(update={"tasks": tasks})
    return training.model_copy(update={"optimizer": settings, "workload": workload})


# Two lanes a device: 0 and 1, 2 and 3, and so on.
MEMBERS = [
    with_numbers(0, 1e-2, 4, clip_norm=1.0),
    with_numbers(1, 3e-3, 1, clip_norm=0.5, weight_decay=0.1),
    with_numbers(2, 1e-2, 7, clip_norm=100.0, warmup_fraction=0.0),
    with_numbers(0, 1e-1, 4, clip_norm=1.0, warmup_fraction=1.0),
    *(with_numbers(seed, 1e-2, 4, clip_norm=1.0) for seed in range(4, 8)),
]


@dataclass
class LocalPack:
    """A compiled pack, its arrays on the devices of this process."""

    program: Any
    sharding: Any
    data: Any
    numbers: Any
    first_state: Any

    @classmethod
    def compiled(cls, trainings: list[Training]) -> LocalPack:
        workloads = [make_workload(Configuration(one, None)) for one in trainings]
        mesh = pack_step.lane_mesh()
        state = pack_step.stacked([initial_state(workload) for workload in workloads])
        data, numbers = pack_step.data_of(workloads), pack_step.numbers_of(trainings)
        lowered = pack_step.lower_pack(trainings[0], workloads[0], mesh, state, data, numbers)
        by_lane = pack_step.lane_sharding(mesh)
        placed = pack_step.PackData(place(data.shared, replicated(mesh)), place(data.own, by_lane))
        return cls(lowered.compile(), by_lane, placed, place(numbers, by_lane), state)

    def run(self, calls: list[list[int]], state: Any = None) -> tuple[Any, list[list[float]]]:
        """Calls with these numbers of steps by lane; the state on the host afterwards, and each lane's losses."""
        placed = place(self.first_state if state is None else state, self.sharding)
        steps = [0] * len(calls[0])
        losses: list[list[float]] = [[] for _ in steps]
        for counts in calls:
            placed, result = self.program(
                placed, self.data, self.numbers, *pack_step.call_arguments(steps, counts)
            )
            for lane, count in enumerate(counts):
                losses[lane] += np.asarray(result.loss)[:count, lane].tolist()
                steps[lane] += count
        return pack_step.on_host(placed), losses


@pytest.fixture(scope="module")
def pack():
    return LocalPack.compiled(MEMBERS)


@pytest.fixture(scope="module")
def undisturbed(pack):
    return pack.run([[5] * 8] * 4)


def test_a_lane_has_the_numbers_of_the_training_alone(undisturbed):
    """To what float32 lets expect: sums are made in another order."""
    state, losses = undisturbed
    alone, expected = LocalRun.compiled(MEMBERS[1]).run([5] * 4)
    np.testing.assert_allclose(losses[1], expected, rtol=1e-4)
    moments = zip(
        jax.tree.leaves(pack_step.lane_of(state, 1)["optimizer"][1].mu),
        jax.tree.leaves(alone["optimizer"][1].mu),
        strict=True,
    )
    for one, other in moments:
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_lanes_of_other_numbers_differ(undisturbed):
    assert len({tuple(one) for one in undisturbed[1]}) == 8


def test_a_neighbour_that_stops_or_lags_behind_changes_no_bit(pack, undisturbed):
    state, losses = undisturbed
    calls = [[5, 1, 5, 0], [5, 4, 0, 0], [5, 0, 0, 1], [5, 5, 5, 4], [0, 5, 0, 5], [0, 5, 0, 5]]
    found, uneven = pack.run([[*counts, 5 if i < 4 else 0, 0, 0, 0] for i, counts in enumerate(calls)])
    for lane, steps in enumerate([20, 20, 10, 15, 20, 0, 0, 0]):
        assert uneven[lane] == losses[lane][:steps], lane
    for lane in (0, 1, 4):
        assert same_bits(pack_step.lane_of(found, lane), pack_step.lane_of(state, lane)), lane


def test_a_neighbour_that_diverges_changes_no_bit(pack, undisturbed):
    state, losses = undisturbed
    broken = jax.tree.map(np.copy, pack.first_state)
    broken["params"].readout.weight[2] = np.nan
    found, beside = pack.run([[5] * 8] * 4, broken)
    assert np.isnan(beside[2]).all()
    for lane in (0, 1, 3, 4):
        assert beside[lane] == losses[lane]
        assert same_bits(pack_step.lane_of(found, lane), pack_step.lane_of(state, lane)), lane


def test_what_has_no_step_keeps_its_state(pack):
    state, _ = pack.run([[0, 2, 0, 0, 0, 0, 0, 0]])
    for lane in (0, 2, 3, 7):
        assert same_bits(pack_step.lane_of(state, lane), pack_step.lane_of(pack.first_state, lane))


def member(training: Training, name: str = "a", **values: Any) -> Member:
    return Member(name, f"gs://b/runs/{name}", 1, (10,), 10, training, **values)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (member(tiny_icl(steps_per_call=2), "b"), "a and b differ in more than seed, schedule_steps"),
        (member(with_numbers(0, 1e-2, None), "b"), "programs of their own"),
        (
            member(tiny_icl(optimizer={"clip_norm": 1.0, "schedule": "constant"}), "b"),
            "programs of their own",
        ),
        (member(tiny_icl(), "b", data_sha256="other"), "programs of their own"),
    ],
)
def test_trainings_of_other_shapes_are_not_packed(other, message):
    check_together([member(tiny_icl()), member(tiny_icl(seed=3), "b")])
    with pytest.raises(PackError, match=message):
        check_together([member(tiny_icl()), other])


def test_what_cannot_be_in_any_pack_says_so():
    with pytest.raises(PackError, match="whole on one chip"):
        in_common(tiny_icl(shard_parameters=True))
    with pytest.raises(PackError, match="a pack has 1 to 64 runs, found 65"):
        check_together([member(tiny_icl())] * 65)
