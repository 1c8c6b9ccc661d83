"""Which trials come, in which order: seeds of a point, points that people add, and a sweep that is taken up."""

from __future__ import annotations

from typing import Any

from tpu.sweeps.config import Search, parse_search
from tpu.sweeps.points import Points
from tpu.sweeps.search import Searcher
from tpu.sweeps.trial import Trial


def space(**values: Any) -> Search:
    return parse_search({"parameters": {"x": {"values": [1, 2, 3]}}, "seeds": 2} | values)


def points(search: Search) -> Points:
    return Points(search, Searcher(search, "s", "sqlite:///:memory:"))


def go_on(made: Points, count: int, begun: list[Trial] | None = None) -> list[Trial]:
    """Begin so many trials, or as many as there are."""
    trials = begun if begun is not None else []
    for _ in range(count):
        if (draft := made.next()) is None:
            break
        trial = Trial(len(trials), draft.point, draft.parameters, draft.seed, f"t{len(trials)}", draft.added)
        trials.append(trial)
        made.begin(trial)
    return trials


def told(trials: list[Trial]) -> list[tuple[int, int, int | None]]:
    return [(trial.point, trial.parameters["x"], trial.seed) for trial in trials]


def test_each_point_comes_with_all_its_seeds():
    made = points(space())
    assert made.left == 6
    trials = go_on(made, 9)
    assert told(trials) == [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1), (2, 3, 0), (2, 3, 1)]
    assert made.left == 0


def test_a_point_that_is_added_comes_next_with_all_seeds_and_beyond_the_limit():
    made = points(space(trials=3))
    trials = go_on(made, 1)
    assert made.add(0, {"x": 40})  # outside of the space
    assert made.left == 4
    assert told(go_on(made, 9, trials)) == [(0, 1, 0), (1, 40, 0), (1, 40, 1), (0, 1, 1), (2, 2, 0)]
    assert made.complete(2)  # cut by the limit
    assert not made.add(1, {"x": 1})
    assert made.add(0, {"x": 40})  # the same wish, read again


def test_a_higher_limit_goes_on_with_the_seeds_that_were_cut():
    made = points(space(trials=3))
    trials = go_on(made, 9)
    made.limit = 5
    assert not made.complete(1)
    assert told(go_on(made, 9, trials))[3:] == [(1, 2, 1), (2, 3, 0)]


def test_a_sweep_that_is_taken_up_goes_on_in_the_middle_of_a_point():
    search = space(method="random", trials=8, parameters={"x": {"min": 0, "max": 10**6}})
    made = points(search)
    whole = go_on(made, 3)
    assert made.add(0, {"x": -1})
    whole = go_on(made, 9, whole)
    assert len(whole) == 10
    for cut in range(3, len(whole)):
        again = points(search)
        again.recall(whole[:cut])
        again.add(0, {"x": -1})
        assert sorted(told(go_on(again, 20, whole[:cut]))) == sorted(told(whole))
