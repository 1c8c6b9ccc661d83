"""What a place's outcomes mean: slower, halted, and one try at a time until it serves again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.candidate import Candidate
from tpu.slices.zone_health import (
    ANSWER_S,
    EARLY_DEATH_S,
    FIRST_HALT_S,
    HALT_FROM,
    LONGEST_PAUSE_S,
    WINDOW_S,
    Closed,
    Fine,
    Paused,
    PlaceHealth,
    Slowed,
    ZoneHealth,
    bad_in_a_row,
    closed,
    from_json,
    let_through,
    noted,
    pause_s,
    permission,
    to_json,
)

SPOT = Candidate("us-east5-a", "v6e-8", "spot")


def stockouts(count: int, every_s: float = 10.0, start: float = 0.0) -> PlaceHealth:
    health = PlaceHealth()
    for number in range(count):
        now = start + number * every_s
        health = noted(health, "stockout", now, now)
    return health


@pytest.mark.parametrize(
    ("bad", "wait_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 16.0), (HALT_FROM - 1, 32.0)]
)
def test_V1_each_stockout_slows_a_place_down(bad: int, wait_s: float):
    health = stockouts(bad)
    last = (bad - 1) * 10.0
    assert permission(health, last) == Slowed(wait_s, f"{bad} bad outcome(s) in a row, lastly no capacity")
    assert permission(health, last + wait_s) == Fine()


@pytest.mark.parametrize(
    ("bad", "halt_s"), [(HALT_FROM, FIRST_HALT_S), (HALT_FROM + 1, 240.0), (HALT_FROM + 30, LONGEST_PAUSE_S)]
)
def test_V1_many_stockouts_halt_it_for_a_while(bad: int, halt_s: float):
    health = stockouts(bad)
    last = (bad - 1) * 10.0
    found = permission(health, last + 1)
    assert isinstance(found, Paused)
    assert found.until == last + halt_s
    assert permission(health, last + halt_s) == Fine()


def test_V1_of_those_who_come_after_the_pause_one_is_let_through():
    health = stockouts(3)
    health, first = let_through(health, 24.0)
    assert first == Fine()
    health, second = let_through(health, 24.5)
    # As long as the first has no answer, the others wait for it, though not for ever.
    assert isinstance(second, Slowed)
    assert second.wait_s == pytest.approx(59.5)
    assert isinstance(let_through(noted(health, "stockout", 24.0, 26.0), 33.9)[1], Slowed)
    assert let_through(noted(health, "stockout", 24.0, 26.0), 34.0)[1] == Fine()
    # It succeeds: everybody may come.
    health = noted(health, "success", 24.0, 26.0)
    for _ in range(3):
        health, found = let_through(health, 26.0)
        assert found == Fine()


def test_V1_where_slices_only_die_early_nobody_waits_for_the_answer_of_another():
    health = noted(PlaceHealth(), "early death", 0.0, 1.0)
    health, first = let_through(health, 5.0)
    assert first == Fine()
    assert isinstance(let_through(health, 5.5)[1], Slowed)
    assert let_through(health, 6.0)[1] == Fine()


def test_V1_a_hundred_refusals_at_once_are_one_stockout():
    health = PlaceHealth()
    for number in range(100):
        health = noted(health, "stockout", asked=0.0, now=5.0 + number / 100)
    assert bad_in_a_row(health.outcomes) == 1


def test_V1_slices_that_die_at_once_are_churn_though_each_was_ready():
    health, now = PlaceHealth(), 0.0
    for round in range(1, 5):
        health = noted(health, "success", now, now + 10)
        health = noted(health, "early death", now, now + 100)
        now += 200
        assert bad_in_a_row(health.outcomes) == round
    found = permission(health, now - 99)
    assert found == Slowed(7.0, "4 bad outcome(s) in a row, lastly a slice lost 100 s after it was asked for")
    # One that lasts ends it, though an older one dies later.
    health = noted(health, "success", now, now + 10)
    assert permission(health, now + 10) == Fine()


@pytest.mark.parametrize(("lived_s", "pause"), [(230.0, 460.0), (200.0, 400.0), (3.0, 6.0), (0.0, 0.0)])
def test_V1_a_pause_for_churn_is_no_longer_than_twice_what_the_slice_took(lived_s: float, pause: float):
    health, now = PlaceHealth(), 0.0
    for _ in range(15):
        health = noted(health, "early death", now, now + lived_s)
        now += lived_s + 0.001
    last = health.outcomes[-1].at
    found = permission(health, last)
    waits = found.until - last if isinstance(found, Paused) else getattr(found, "wait_s", 0.0)
    assert waits == pytest.approx(pause)
    # A stockout after it has cost nothing, and is answered as ever.
    after = permission(noted(health, "stockout", now, now), now)
    assert isinstance(after, Paused)
    assert after.until - now == pytest.approx(LONGEST_PAUSE_S)


def test_outcomes_are_forgotten_after_the_window():
    health = stockouts(20)
    assert isinstance(permission(health, 191.0), Paused)
    assert permission(health, 190.0 + WINDOW_S) == Fine()
    assert noted(health, "stockout", 9000.0, 9000.0).outcomes[0].at == 9000.0


def test_a_success_where_nothing_was_bad_is_not_worth_a_write():
    assert noted(PlaceHealth(), "success", 0.0, 1.0) == PlaceHealth()


def test_V2_no_quota_closes_a_place_until_somebody_opens_it():
    known = ZoneHealth().having(SPOT, closed(PlaceHealth(), "TPUV6EPreemptible"))
    assert permission(known.of(SPOT), 1e12) == Closed("TPUV6EPreemptible")
    on_demand = Candidate("us-east5-a", "v6e-8", "on-demand")
    assert permission(known.of(on_demand), 0.0) == Fine()
    assert permission(known.opened("us-east5-a").of(SPOT), 0.0) == Fine()
    assert known.opened("us-east5-b") == known


def test_a_clock_that_is_behind_is_not_held_longer_than_a_pause():
    health = stockouts(3, start=100_000.0)
    found = permission(health, 0.0)
    assert isinstance(found, Slowed)
    assert found.wait_s == pause_s(3)


outcomes = st.lists(
    st.tuples(
        st.sampled_from(["stockout", "early death", "success"]),
        st.floats(1, 5000),  # how long ago it was asked
        st.floats(0, 300),  # how long after the one before it was noted
        st.booleans(),  # whether somebody asks then
    ),
    max_size=80,
)


@given(outcomes)
def test_whatever_happens_a_place_is_asked_again_within_the_longest_pause(told):
    health, now = PlaceHealth(), 10_000.0
    for kind, ago, later, asks in told:
        now += later
        health = noted(health, kind, now - ago, now)
        if asks:
            health, _ = let_through(health, now)
    assert from_json(json.loads(json.dumps(to_json(ZoneHealth().having(SPOT, health))))).of(SPOT) == health
    match permission(health, now):
        case Slowed(wait_s):
            assert 0 < wait_s <= ANSWER_S
            assert let_through(health, now + wait_s)[1] == Fine()
        case Paused(until):
            assert now < until <= now + LONGEST_PAUSE_S
            assert permission(health, until) == Fine()
        case Fine():
            # One who goes through holds up the next, exactly if the place is bad.
            after, _ = let_through(health, now)
            assert (permission(after, now) == Fine()) == (
                bad_in_a_row(health.outcomes) == 0 or after == health
            )


@given(outcomes)
def test_a_success_that_lasts_makes_any_place_fine(told):
    health, now = PlaceHealth(), 10_000.0
    for kind, ago, later, _ in told:
        now += later
        health = noted(health, kind, now - ago, now)
    assert permission(noted(health, "success", now, now), now) == Fine()


@given(outcomes)
def test_a_death_never_leaves_a_place_better_than_before(told):
    health, now = PlaceHealth(), 10_000.0
    for kind, ago, later, _ in told:
        now += later
        health = noted(health, kind, now - ago, now)
    after = noted(health, "early death", now - EARLY_DEATH_S, now)
    assert bad_in_a_row(after.outcomes) >= bad_in_a_row(noted(health, "stockout", -1.0, now).outcomes)
