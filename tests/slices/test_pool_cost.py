"""What a pool costs is what its slices cost, whoever had them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.lease import Holder, Lease
from tpu.slices.pool_cost import pool_cost

SPOT = Candidate("us-central2-b", "v4-8", "spot", 4.0)
HOUR = 3600.0


def ready(name: str = "s", at: float = 0.0, holder: Holder | None = None) -> Lease:
    return leases.ready(leases.intend(name, "p", SPOT, 4, "c", at - 60, holder), at)


def test_runs_pay_their_chips_and_the_pool_what_is_left():
    lease = leases.take(ready(), Holder("a", "a", (0,)), 0)
    lease = leases.take(lease, Holder("b", "b", (1, 2)), HOUR)
    lease = leases.release(lease, "a", 2 * HOUR)
    found = pool_cost([lease], 3 * HOUR)
    assert found.by_run == pytest.approx({"a": 2.0, "b": 4.0})
    assert found.idle == pytest.approx(12.0 - 6.0)
    assert (found.slices, found.an_hour, found.idle_an_hour) == (1, 4.0, 2.0)


def test_a_slice_costs_from_ready_to_gone():
    made = leases.intend("s", "p", SPOT, 4, "c", 0, Holder("a", "a", (0, 1, 2, 3)))
    assert pool_cost([made], HOUR).dollars == 0
    over = leases.gone(leases.release(leases.ready(made, HOUR), "a", 2 * HOUR), "idle", 3 * HOUR)
    found = pool_cost([over], 99 * HOUR)
    assert (found.by_run["a"], found.idle) == pytest.approx((4.0, 4.0))
    assert (found.slices, found.an_hour) == (0, 0.0)


def test_a_price_that_nobody_set_is_told_apart():
    free = dataclasses.replace(ready(), candidate=dataclasses.replace(SPOT, price_an_hour=None))
    found = pool_cost([free, ready("t")], HOUR)
    assert found.unpriced == {"spot v4-8 in us-central2-b": HOUR}
    assert found.dollars == pytest.approx(4.0)


changes = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.floats(0, 1000)), max_size=30)


@given(changes, st.floats(0, 1000))
def test_used_and_idle_sum_to_what_the_slice_costs(events, later):
    lease, now = ready(), 0.0
    for run, chip, wait in events:
        now += wait
        if lease.holder(run) is not None:
            lease = leases.release(lease, run, now)
        elif chip in lease.free_chips:
            lease = leases.take(lease, Holder(run, run, (chip,)), now)
    now += later
    assert pool_cost([lease], now).dollars == pytest.approx(4.0 * now / HOUR)
