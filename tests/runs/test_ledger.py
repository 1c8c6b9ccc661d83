from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs.histories import at, attempt_ended, histories, intended, leased
from tpu.money import dollar_column, in_dollars
from tpu.runs.ledger import holdings, make_ledger

HOUR = 3600.0


@given(histories(), st.floats(0, 100))
def test_the_charges_of_a_slice_sum_exactly_to_the_time_it_was_held(events, later):
    until = (events[-1].time if events else 0.0) + later
    ledger = make_ledger(events, (20, 40, 60), until)
    sums: dict[object, int] = defaultdict(int)
    for charge in ledger.charges:
        assert charge.chip_us > 0
        assert 1 <= charge.segment <= 3
        sums[charge.holding] += charge.chip_us
    # Two equal holdings would be one key: no history has them, since a slice is held once at a time.
    assert sums == {one: one.chip_us for one in ledger.holdings if one.chip_us}
    assert ledger.holdings == holdings(events, until)
    for one in ledger.holdings:
        parts = [c.dollars for c in ledger.charges if c.holding == one]
        if one.price_an_hour is not None:
            assert sum(parts) == pytest.approx(one.dollars(one.chip_us))
        else:
            assert set(parts) <= {None}


def test_a_slice_costs_from_ready_to_gone_whatever_it_was_doing():
    events = [
        intended(0, "a", 36.0),
        at(100, "slice-ready", slice="a"),
        at(100, "attempt-started", attempt=1),
        attempt_ended(300, 1, phases=[(110, "step")], waste_from=280, commits=[(200, 20)], last_commit=20),
        at(400, "slice-deleted", slice="a"),
        at(500, "provision-failed", slice="b"),
    ]
    ledger = make_ledger(events, (20, 40), 1000)
    assert ledger.dollars == pytest.approx(3.0)  # 300 s at a cent a second
    assert ledger.by(lambda charge: charge.bucket) == pytest.approx(
        {"start": 0.1, "step": 1.7, "wasted": 0.2, "other": 1.0}
    )
    assert ledger.by(lambda charge: charge.segment) == pytest.approx({1: 1.0, 2: 2.0})
    assert ledger.dollars_an_hour == 0


def test_one_that_never_was_ready_costs_nothing_whatever_its_price():
    ledger = make_ledger([intended(0, "a", None), at(50, "slice-deleted", slice="a")], (20,), 100)
    assert ledger.dollars == 0
    assert ledger.unpriced_s == {}


def test_a_price_that_nobody_set_is_not_zero():
    events = [
        intended(0, "a", None), at(0, "slice-ready", slice="a"), at(HOUR, "slice-deleted", slice="a"),
    ]  # fmt: skip
    alone = make_ledger(events, (20,), 2 * HOUR)
    assert alone.dollars is None
    assert alone.unpriced_s == {"spot v4-8 in us-central2-b": HOUR}
    both = make_ledger(
        [*events, intended(HOUR, "b", 2.0), at(HOUR, "slice-ready", slice="b")], (20,), 2 * HOUR
    )
    assert both.dollars == pytest.approx(2.0)
    assert both.unpriced_s == {"spot v4-8 in us-central2-b": HOUR}
    assert both.dollars_an_hour == 2.0


def test_of_a_slice_that_it_shares_a_run_pays_its_chips():
    events = [leased(0, "a", [2], 4.0), at(HOUR, "slice-released", slice="a", why="done")]
    assert make_ledger(events, (20,), 5 * HOUR).dollars == pytest.approx(1.0)
    # Taken again later, it is paid again, and not for the time between.
    again = [*events, leased(2 * HOUR, "a", [0, 1], 4.0), at(3 * HOUR, "slice-deleted", slice="a")]
    ledger = make_ledger(again, (20,), 5 * HOUR)
    assert ledger.dollars == pytest.approx(3.0)
    assert [one.chips for one in ledger.holdings] == [1, 2]


def test_a_slice_that_was_made_for_a_few_of_its_chips():
    made = [intended(0, "a", 4.0, chips=[0]), at(0, "slice-ready", slice="a")]
    assert make_ledger(made, (20,), HOUR).dollars == pytest.approx(1.0)


def test_a_slice_released_and_then_deleted_is_paid_once():
    events = [
        leased(0, "a", [0, 1, 2, 3], 1.0), at(HOUR, "slice-released", slice="a"),
        at(2 * HOUR, "slice-deleted", slice="a"),
    ]  # fmt: skip
    assert make_ledger(events, (20,), 3 * HOUR).dollars == pytest.approx(1.0)


def test_several_slices_at_once_cost_each_their_own():
    events = [
        intended(0, "a", 1.0), intended(0, "b", 2.0), at(0, "slice-ready", slice="a"),
        at(HOUR, "slice-ready", slice="b"),
    ]  # fmt: skip
    ledger = make_ledger(events, (20,), 2 * HOUR)
    assert ledger.dollars == pytest.approx(4.0)
    assert ledger.by(lambda charge: charge.holding.slice) == pytest.approx({"a": 2.0, "b": 2.0})


def test_egress_is_a_line_of_its_own():
    events = [at(0, "egress", what="checkpoints to europe-west4", dollars=0.5)] * 2
    ledger = make_ledger(events, (20,), HOUR)
    assert ledger.egress == {"checkpoints to europe-west4": 1.0}
    assert ledger.dollars == 1.0


def test_a_clock_that_was_set_back_costs_nothing():
    events = [intended(0, "a"), at(100, "slice-ready", slice="a"), at(50, "slice-deleted", slice="a")]
    assert make_ledger(events, (20,), 200).dollars == 0


@given(st.lists(st.floats(0, 1e5), max_size=20))
def test_lines_of_a_table_add_up_to_its_shown_total(values):
    column = [float(text.lstrip("$").replace(",", "")) for text in dollar_column(values)]
    total = float(in_dollars(sum(values)).lstrip("$").replace(",", ""))
    assert round(sum(column), 4) == total
    assert all(abs(a - b) < 0.011 for a, b in zip(column, values, strict=True))
