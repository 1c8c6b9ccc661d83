"""A grid has every point once, however parameters depend on each other, and is counted without being made."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tpu.sweeps.grid import count, points
from tpu.sweeps.parameters import Parameter, canonical


def space(**parameters: Any) -> dict[str, Parameter]:
    return {name: Parameter.model_validate(values) for name, values in parameters.items()}


def test_the_last_parameter_changes_fastest():
    assert list(points(space(a={"values": [1, 2]}, b={"min": 0, "max": 2}))) == [
        {"a": a, "b": b} for a in (1, 2) for b in (0, 1, 2)
    ]


def test_a_conditional_parameter_is_there_only_under_its_condition():
    made = space(
        kind={"values": ["adam", "sgd"]},
        momentum={"values": [0.0, 0.9], "when": {"kind": "sgd"}},
        seed={"values": [0]},
    )
    assert list(points(made)) == [
        {"kind": "adam", "seed": 0},
        {"kind": "sgd", "momentum": 0.0, "seed": 0},
        {"kind": "sgd", "momentum": 0.9, "seed": 0},
    ]


def test_a_huge_grid_is_counted_and_begun_at_once():
    huge = space(**{name: {"min": 1, "max": 1000} for name in "abc"})
    assert count(huge) == 10**9
    assert list(islice(points(huge), 2)) == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 2}]


@given(st.data())
def test_as_many_points_are_made_as_are_counted_and_no_two_are_the_same(data: st.DataObject):
    made: dict[str, Parameter] = {}
    for name in "abcd"[: data.draw(st.integers(1, 4))]:
        when = None
        if made and data.draw(st.booleans()):
            parent = data.draw(st.sampled_from(sorted(made)))
            when = {parent: data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))}
        values = list(range(data.draw(st.integers(1, 3))))
        made[name] = Parameter(values=values, when=when)
    found = [canonical(point) for point in points(made)]
    assert len(found) == len(set(found)) == count(made)
