"""Histories are a function of their seed, and together they hold every trouble."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from deployments.bench.chaos.plan import Doom, Fault, make_history

SEEDS = range(1, 201)


def test_a_seed_gives_the_same_history_again():
    assert [make_history(seed) for seed in SEEDS] == [make_history(seed) for seed in SEEDS]


def test_the_histories_of_the_benchmark_hold_every_trouble_and_every_end():
    histories = [make_history(seed) for seed in SEEDS]
    struck = Counter(fault for history in histories for fault in history.faults)
    of_itself = {"hang-program", "program-error", "diverge"}
    assert struck.keys() == set(get_args(Fault)) - of_itself
    assert min(struck.values()) >= 5
    assert Counter(history.doom for history in histories).keys() == {None, *get_args(Doom)}
    fails = {
        history.run.variables.get("NUMPY_FAIL", "").partition("@")[0].partition(":")[0]
        for history in histories
    }
    assert fails == {"", "exception", "exit", "nan", "nanstate", "hang"}


def test_most_runs_can_end_well():
    doomed = sum(make_history(seed).doom is not None for seed in SEEDS)
    assert 10 <= doomed <= 60
