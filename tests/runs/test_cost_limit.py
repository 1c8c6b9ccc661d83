"""How near a run is to its max_cost, and what is refused before anything is made."""

from __future__ import annotations

import pytest

from flows.arguments import describe
from tests.runs.histories import at, intended, leased
from tpu.runs.config import RunConfigError, parse_run_config
from tpu.runs.cost_limit import LONGEST_LOOK_S, SHORTEST_LOOK_S, look


def running(price: float | None):
    return [intended(0, "a", price), at(0, "slice-ready", slice="a")]


@pytest.mark.parametrize(
    ("now", "reached", "warn"),
    [(0, False, False), (799, False, False), (800, False, True), (1000, True, True)],
)
def test_a_run_is_warned_at_four_fifths_and_ended_at_its_limit(now, reached, warn):
    found = look(running(3.6), 1.0, now)  # a dollar in 1,000 s
    assert (found.reached, found.warn, found.spent) == (reached, warn, pytest.approx(now / 1000))


def test_it_looks_again_when_the_limit_can_be_reached_and_often_enough_to_see_a_new_slice():
    assert look(running(3.6), 1.0, 999.5).next_s == pytest.approx(0.5)
    assert look(running(3600.0), 1.0, 0.999).next_s == SHORTEST_LOOK_S
    assert look(running(3.6), 1.0, 0).next_s == LONGEST_LOOK_S
    assert look([], 1.0, 0).next_s == LONGEST_LOOK_S


def test_what_earlier_drivers_spent_counts():
    before = [*running(3.6), at(900, "slice-deleted", slice="a"), at(5000, "driver-started")]
    assert look(before, 1.0, 9000).spent == pytest.approx(0.9)
    assert look([*before, leased(9000, "b", [0])], 1.0, 9400).reached  # a quarter of a slice


def test_a_slice_of_the_pool_without_a_price_is_said():
    found = look([leased(0, "a", [0], None)], 1.0, 100)
    assert (found.spent, found.unpriced) == (0.0, ("spot v4-8 in us-central2-b",))


@pytest.mark.parametrize(
    ("slice", "named"),
    [
        ({}, "spot v4-8 in us-central2-b"),
        ({"price_an_hour": 1.0, "candidates": [{}, {"provisioning": "on-demand"}]}, "on-demand v4-8"),
    ],
)
def test_a_limit_is_refused_where_a_price_is_missing(slice, named):
    values = {"name": "r", "command": "python own.py", "evaluate": "never", "slice": slice, "max_cost": 5}
    with pytest.raises(RunConfigError, match=f"max_cost cannot be held without the price of {named}"):
        parse_run_config(values)


@pytest.mark.parametrize("limit", [0, -1, "nan", "inf"])
def test_a_limit_is_above_zero_and_a_number(limit):
    values = {"name": "r", "command": "python own.py", "evaluate": "never", "max_cost": float(limit)}
    with pytest.raises(RunConfigError, match="max_cost"):
        parse_run_config(values | {"slice": {"price_an_hour": 1.0}})


def test_a_dry_run_tells_how_soon_the_limit_can_be_reached():
    ways = {"price_an_hour": 2.0, "candidates": [{}, {"provisioning": "on-demand", "price_an_hour": 10.0}]}
    values = {"name": "r", "command": "python own.py", "evaluate": "never", "slice": ways, "max_cost": 25}
    assert (
        "max_cost   $25.00: the run saves and ends when it is spent, after 2.5 h of a whole on-demand v4-8"
        in (describe(parse_run_config(values)))
    )
