"""The guard of graphs, from counts alone."""

from __future__ import annotations

from tpu.train.graph_guard import GraphGuard
from tpu.train.randomness import step_seeds
from tpu.train.xla_device import GraphCounts, cause_in

# As torch_xla 2.9 writes it.
TOLD = """
Compilation Analysis: Python Frame Triggered Execution:
Compilation Analysis:   earlier (/home/me/loop.py:7)
Compilation Analysis: --------------------------------------------------------------------------------
Compilation Analysis: ================================================================================
Compilation Analysis: Compilation Cause
Compilation Analysis:   user torch_xla.sync
Compilation Analysis: Python Frame Triggered Execution: 
Compilation Analysis:   sync (/env/site-packages/torch_xla/torch_xla.py:88)
Compilation Analysis:   train (/home/me/loop.py:21)
Compilation Analysis:   <module> (/home/me/loop.py:31)
Compilation Analysis: --------------------------------------------------------------------------------
Compilation Analysis: ================================================================================

Post Compilation Analysis: Graph input size: 0.000000 GB
Post Compilation Analysis: --------------------------------------------------------------------------------
"""


class Counter:
    """Counts that a test sets."""

    def __init__(self) -> None:
        self.now = GraphCounts(0, 0, {})

    def __call__(self) -> GraphCounts:
        return self.now


def guard_of(counter: Counter) -> tuple[GraphGuard, list[str]]:
    told: list[str] = []
    return GraphGuard(counter, lambda: "loop.py:21 in train", told.append), told


def test_compilations_count_only_after_the_warm_up():
    counter = Counter()
    guard, told = guard_of(counter)
    counter.now = GraphCounts(2, 1, {})
    assert not guard.look(1)
    guard.warmed_up()
    counter.now = GraphCounts(2, 50, {})
    assert not guard.look(50)
    assert (guard.report().compiled, guard.report().recompiled, told) == (2, 0, [])
    counter.now = GraphCounts(3, 51, {})
    assert guard.look(51)
    assert told == ["compiled 1 graph(s) anew before step 51: loop.py:21 in train"]
    assert not guard.look(52)
    assert guard.report().recompiled == 1


def test_an_operator_on_the_cpu_is_told_once_a_look():
    counter = Counter()
    guard, told = guard_of(counter)
    counter.now = GraphCounts(1, 1, {"aten::linalg_solve": 1})
    assert guard.look(1)
    assert not guard.look(2)
    assert told == ["ran on the CPU before step 1: aten::linalg_solve"]
    assert guard.report().fallbacks == {"aten::linalg_solve": 1}


def test_the_line_is_the_innermost_that_is_not_of_torch():
    assert cause_in(TOLD) == "/home/me/loop.py:21 in train"
    assert cause_in("") is None


def test_seeds_of_a_step_are_its_own():
    seeds = [step_seeds(seed, step, device) for seed in (0, 1) for step in (0, 1) for device in (0, 1)]
    assert seeds == [
        step_seeds(seed, step, device) for seed in (0, 1) for step in (0, 1) for device in (0, 1)
    ]
    for kind in ("xla", "torch", "numpy"):
        assert len({getattr(s, kind) for s in seeds}) == len(seeds)
    assert all(0 <= s.xla < 2**63 and 0 <= s.numpy < 2**32 for s in seeds)
