"""The figures of the chaos benchmark out of what its histories came to."""

from __future__ import annotations

from deployments.bench.chaos.histories import Judged, summary
from deployments.bench.chaos.judge import Injected, Outcome
from deployments.bench.chaos.plan import make_history
from deployments.bench.chaos.play import Played


def played(seed: int, *faults: str, complaints: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> Judged:
    injected = [Injected(1.0, fault, "one") for fault in faults]
    history = make_history(seed)
    outcome = Outcome(injected, 0, "", [], [], [], left)
    return Judged(history, complaints, Played(history, outcome, 10.0 * seed, 1))


def test_each_history_counts_once_a_kind_of_trouble_and_one_that_fails_holds_nowhere():
    figures = summary(
        [
            played(1, "preempt", "preempt", "kill-flow"),
            played(2, "preempt", complaints=("wrong bits: w0",), left=("node x (READY)",)),
            Judged(make_history(3), ["it could not be played"]),
        ],
        left=["node x"],
    )
    assert figures["ratio"] == 0.3333
    assert figures["histories"] == 3
    assert figures["leaks"] == 1
    assert figures["seconds"] == 15.0
    assert figures["by_fault"] == {
        "kill-flow": {"times": 1, "histories": 1, "held": 1},
        "preempt": {"times": 3, "histories": 2, "held": 1},
    }
    assert [failure["seed"] for failure in figures["failures"]] == [2, 3]
