import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.runs.plan import CheckpointRule, stop_steps


@pytest.mark.parametrize(
    ("rule", "steps", "stops"),
    [
        ({}, 1000, (200, 400, 600, 800, 1000)),
        ({}, 3, (1, 2, 3)),
        ({"every": 300}, 1000, (300, 600, 900, 1000)),
        ({"every": 5000}, 1000, (1000,)),
        ({"log_spaced": 4}, 1000, (1, 10, 100, 1000)),
        ({"log_spaced": 1}, 1000, (1, 1000)),
        ({"at": [7, 3, 7]}, 10, (3, 7, 10)),
    ],
)
def test_rules(rule, steps, stops):
    assert stop_steps(CheckpointRule(**rule), steps) == stops


@given(
    st.one_of(
        st.builds(CheckpointRule, every=st.integers(1, 50)),
        st.builds(CheckpointRule, log_spaced=st.integers(1, 50)),
    ),
    st.integers(1, 10_000),
)
def test_any_rule_ascends_and_ends_at_the_last_step(rule, steps):
    stops = stop_steps(rule, steps)
    assert stops[-1] == steps
    assert all(0 < a < b for a, b in itertools.pairwise(stops))


def test_impossible_rules_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="one of every, log_spaced and at; found every and at"):
        CheckpointRule(every=5, at=[3])
    with pytest.raises(ValueError, match="11 is not between 1 and steps = 10"):
        stop_steps(CheckpointRule(at=[3, 11]), 10)
    with pytest.raises(ValueError, match="50000 of them in 1000000 steps, more than 10000"):
        stop_steps(CheckpointRule(every=20), 10**6)


@pytest.mark.parametrize("rule", [{"every": 1}, {"log_spaced": 10**12}])
def test_a_slip_of_the_pen_is_refused_before_it_fills_the_memory(rule):
    with pytest.raises(ValueError, match="1000000000000 of them"):
        stop_steps(CheckpointRule(**rule), 10**12)
