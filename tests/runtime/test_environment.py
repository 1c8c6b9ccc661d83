"""The environment of a training process, by table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.runtime.environment import (
    FIRST_PORT,
    LAST_PORT,
    STALE_VARIABLES,
    ChipsError,
    attempt_ports,
    training_environment,
)
from tpu.topology import ACCELERATOR_TYPES, accelerator_type

MEGASCALE = {
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_PORT",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
}
PAIR = ["10.0.0.1", "10.0.0.2"]


def test_a_whole_slice_of_two_hosts() -> None:
    port = attempt_ports("r", 3).coordinator
    made = training_environment(accelerator_type("v4-16"), 1, PAIR, "r", 3)
    assert made == {
        "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_HOST_BOUNDS": "1,1,2",
        "TPU_PROCESS_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
        "MEGASCALE_COORDINATOR_ADDRESS": "",
        "MEGASCALE_PORT": "",
        "MEGASCALE_NUM_SLICES": "",
        "MEGASCALE_SLICE_ID": "",
        "JAX_COORDINATOR_PORT": str(port),
        "RELAY_RUN": "r",
        "RELAY_ATTEMPT": "3",
        "RELAY_COORDINATOR": f"10.0.0.1:{port}",
        "RELAY_NUM_PROCESSES": "2",
        "RELAY_PROCESS_ID": "1",
    }


@pytest.mark.parametrize(
    ("kind", "chips", "bounds"),
    [
        ("v4-8", (2,), "1,1,1"),
        ("v4-8", (0, 1), "1,2,1"),
        ("v4-8", (0, 1, 2, 3), "2,2,1"),
        ("v6e-8", (4, 5, 6, 7), "2,2,1"),
        ("v6e-8", tuple(range(8)), "2,4,1"),
    ],
)
def test_a_part_of_a_host_has_its_chips_and_no_peers(kind: str, chips: tuple[int, ...], bounds: str) -> None:
    made = training_environment(accelerator_type(kind), 0, ["10.0.0.1"], "r", 1, chips=chips)
    assert made["TPU_VISIBLE_CHIPS"] == made["TPU_VISIBLE_DEVICES"] == ",".join(map(str, chips))
    assert (made["TPU_CHIPS_PER_PROCESS_BOUNDS"], made["TPU_PROCESS_BOUNDS"]) == (bounds, "1,1,1")
    assert (made["RELAY_NUM_PROCESSES"], made["RELAY_PROCESS_ID"]) == ("1", "0")


@pytest.mark.parametrize("chips", [(4,), (-1,), (0, 0), (0, 1, 2), ()])
def test_chips_that_cannot_be_are_refused(chips: tuple[int, ...]) -> None:
    with pytest.raises(ChipsError):
        training_environment(accelerator_type("v4-8"), 0, ["10.0.0.1"], "r", 1, chips=chips)


def test_one_host_of_many_used_alone_is_its_own_coordinator() -> None:
    made = training_environment(accelerator_type("v4-16"), 1, PAIR, "r", 1, chips=(0,))
    assert made["TPU_WORKER_HOSTNAMES"] == "10.0.0.2"
    assert made["RELAY_COORDINATOR"].startswith("10.0.0.2:")


def test_two_slices_number_their_processes_through() -> None:
    heads = ("10.0.0.1", "10.1.0.1")
    made = training_environment(
        accelerator_type("v4-16"), 1, ["10.1.0.1", "10.1.0.2"], "r", 1, slice_index=1, slice_heads=heads
    )
    ports = attempt_ports("r", 1)
    assert made["MEGASCALE_COORDINATOR_ADDRESS"] == f"10.0.0.1:{ports.megascale}"
    assert (made["MEGASCALE_NUM_SLICES"], made["MEGASCALE_SLICE_ID"]) == ("2", "1")
    assert made["RELAY_COORDINATOR"] == f"10.0.0.1:{ports.coordinator}"
    assert (made["RELAY_NUM_PROCESSES"], made["RELAY_PROCESS_ID"]) == ("4", "3")


@pytest.mark.parametrize(("index", "names"), [(2, PAIR), (-1, PAIR), (0, ["10.0.0.1"])])
def test_hosts_that_do_not_fit_the_type_are_refused(index: int, names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"v4-16 has 2 host\(s\)"):
        training_environment(accelerator_type("v4-16"), index, names, "r", 1)


@given(st.sampled_from(sorted(ACCELERATOR_TYPES)), st.integers(0, 10_000))
def test_G3_megascale_is_always_set_and_nothing_stale_is_left(name: str, attempt: int) -> None:
    kind = accelerator_type(name)
    made = training_environment(kind, 0, [f"h{i}" for i in range(kind.hosts)], "r", attempt)
    assert made.keys() >= MEGASCALE
    assert all(made[key] == "" for key in MEGASCALE)
    assert "TPU_VISIBLE_CHIPS" in STALE_VARIABLES


@given(st.text(), st.integers(0, 10_000))
def test_G1_every_attempt_has_fresh_ports(run: str, attempt: int) -> None:
    mine, next_one = attempt_ports(run, attempt), attempt_ports(run, attempt + 1)
    used = {mine.coordinator, mine.megascale, mine.process}
    assert len(used) == 3
    assert not used & {next_one.coordinator, next_one.megascale, next_one.process}
    assert all(FIRST_PORT <= port < LAST_PORT for port in used)


def test_G2_the_coordinator_of_another_attempt_is_another_one() -> None:
    kind = accelerator_type("v4-8")
    made = [training_environment(kind, 0, ["10.0.0.1"], "r", a)["RELAY_COORDINATOR"] for a in (1, 2)]
    assert made[0] != made[1]


@given(st.text(), st.text(), st.integers(0, 10_000), st.integers(0, 10_000), st.permutations(range(8)))
def test_G6_runs_on_other_chips_of_the_same_host_never_share_a_port(
    run: str, other: str, attempt: int, others: int, chips: list[int]
) -> None:
    mine, theirs = attempt_ports(run, attempt, (chips[0],)), attempt_ports(other, others, (chips[1],))
    assert not {mine.coordinator, mine.megascale, mine.process} & {
        theirs.coordinator, theirs.megascale, theirs.process,
    }  # fmt: skip
