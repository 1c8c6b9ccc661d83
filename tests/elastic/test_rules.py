"""Whatever members do, tables are whole, survivors keep their units, and the run gets to its end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu.elastic import hearing
from tpu.elastic.rules import Options, State, decide
from tpu.elastic.table import Table, deal, table_of, without

OPTIONS = Options(
    units=8, expect=2, form_s=5, reconnect_s=1, silent_s=4, stuck_s=8, ahead_s=0.5, last_step=40
)


class Fleet:
    """Simulated members: they hear of tables at once, and make a step when all of its members can."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state = State()
        self.steps: dict[int, int] = {}  # of each living member
        self.silent: set[int] = set()
        self.done = 0
        self.reasons: list[str] = []
        self._count = 0

    def start(self) -> None:
        self._count += 1
        self.state, member = hearing.joined(self.state, self.now, f"slice-{self._count}")
        self.steps[member] = 0 if not self.state.tables else -1

    def kill(self, which: int) -> None:
        if self.steps:
            member = sorted(self.steps)[which % len(self.steps)]
            del self.steps[member]
            self.silent.discard(member)
            self.state = hearing.closed(self.state, self.now, member)

    def silence(self, which: int) -> None:
        if self.steps:
            self.silent.add(sorted(self.steps)[which % len(self.steps)])

    def tick(self) -> None:
        """Half a second: whoever can makes a step, and all who speak report."""
        self.now += 0.5
        self._make_steps()
        for member in sorted(self.steps.keys() - self.silent):
            self._report(member)
        before = self.state
        decision = decide(self.now, before, OPTIONS)
        self._check(before, decision.state)
        self.state = decision.state
        self.reasons.append(decision.reason)
        for gone in decision.evicted:
            self.steps.pop(gone.id, None)
            self.silent.discard(gone.id)
        if not self.state.tables:
            # From the last commit: that of the last step done, here.
            self.steps = dict.fromkeys(self.steps, self.done)

    def _make_steps(self) -> None:
        tables = self.state.tables
        if tables:
            self.steps |= dict.fromkeys(
                self.steps.keys() - self.silent, self.done
            )  # who is behind follows a peer
        able = {m: step for m, step in self.steps.items() if m not in self.silent}
        table = table_of(tables, self.done)
        if table is None or not all(able.get(m) == self.done for m in table.members):
            return
        self.done += 1
        self.steps |= dict.fromkeys(table.members, self.done)

    def _report(self, member: int) -> None:
        step, table = self.steps[member], table_of(self.state.tables, self.done)
        waits = table is not None and member in table.members
        awaits = (
            [m for m in table.members if self.steps.get(m) != self.done or m in self.silent] if table else []
        )
        self.state = hearing.reported(
            self.state, self.now, member, report(self.state, step, awaits if waits else [])
        )

    def _check(self, before: State, after: State) -> None:
        tables = after.tables
        for table in tables:
            assert set(table.units) <= set(table.members) <= after.members.keys()
            assert set(table.shards) <= set(table.members)
            assert len(table.units) == OPTIONS.units
        assert all(a.until == b.first for a, b in itertools.pairwise(tables))
        for step in range(self.done, OPTIONS.last_step):
            old, new = table_of(before.tables, step), table_of(tables, step)
            if old is None or new is None or not set(old.members) & after.members.keys():
                continue  # those who begin anew come from the last commit
            assert set(new.members) <= set(old.members)
            assert all(new.units_of(m) >= old.units_of(m) for m in new.members)


def report(state: State, step: int, awaits: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "version": state.version, "step": max(step, 0), "ready": step >= 0, "follows": step >= 0, "unit_s": 0.1,
        "awaits": awaits, "awaits_s": 1.0 if awaits else 0.0, "broken": [], "hashes": {}, "committed": 0, **changes,
    }  # fmt: skip


_ACTIONS = st.lists(
    st.one_of(
        st.just(("tick", 0)), st.just(("start", 0)), st.tuples(st.sampled_from(["kill", "silence"]), st.integers(0, 5))
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_ACTIONS)
def test_any_history_keeps_the_rules_and_comes_to_an_end(actions: list[tuple[str, int]]) -> None:
    fleet = Fleet()
    for action, which in actions:
        if action == "tick":
            fleet.tick()
        elif action == "start":
            fleet.start()
        else:
            getattr(fleet, action)(which)
    fleet.start()
    fleet.start()
    for _ in range(200):
        if fleet.done < OPTIONS.last_step:
            fleet.tick()
    assert fleet.done == OPTIONS.last_step, fleet.reasons[-5:]


@given(st.dictionaries(st.integers(0, 50), st.floats(0.01, 10), min_size=1, max_size=8), st.integers(1, 64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_dealt_units_are_done_as_early_as_can_be(seconds: dict[int, float], units: int) -> None:
    table = deal(0, 4, seconds, units)
    assert list(table.units) == sorted(table.units)
    ends = [len(table.units_of(m)) * seconds[m] for m in table.members]
    # One unit more on whoever would have it done first is no less than what the slowest has, but for equal shares.
    best = min((len(table.units_of(m)) + 1) * seconds[m] for m in table.members)
    assert max(ends) <= 1.15 * max(best, max(seconds[m] for m in table.members) * -(-units // len(seconds)))


def test_survivors_keep_what_they_had_and_share_the_rest() -> None:
    table = deal(0, 4, {1: 1.0, 2: 1.0, 5: 1.0, 7: 1.0}, 8)
    left = without(table, 5, {1: 1.0, 2: 1.0, 7: 1.0})
    assert table.units == (1, 1, 2, 2, 5, 5, 7, 7)
    assert left.units == (1, 1, 2, 2, 1, 2, 7, 7)
    assert [left.shards.count(m) for m in left.members] == [40, 40, 40]
    with pytest.raises(ValueError, match="last member"):
        without(Table(0, 1, (3,), (3,), (3,)), 3, {})


def two_inside(count: int = 2) -> State:
    state = State()
    for number in range(count):
        state, member = hearing.joined(state, 0.0, f"slice-{number}")
        state = hearing.reported(state, 0.0, member, report(state, 0, []))
    return decide(0.0, state, replace(OPTIONS, expect=count)).state


def test_a_state_that_differs_from_most_others_is_quarantined() -> None:
    state = two_inside(3)
    for member, digest in enumerate(["a", "b", "a"]):
        state = hearing.reported(state, 1.0, member, report(state, 1, [], hashes={"1": digest}))
    [gone] = decide(1.0, state, OPTIONS).evicted
    assert (gone.id, gone.quarantined, gone.final) == (1, True, True)


def test_of_two_states_that_differ_neither_is_believed() -> None:
    state = two_inside(2)
    state = hearing.reported(state, 1.0, 0, report(state, 1, [], hashes={"1": "a"}))
    assert decide(1.0, state, OPTIONS).evicted == ()
    state = hearing.reported(state, 1.0, 1, report(state, 1, [], hashes={"1": "b"}))
    gone = decide(1.0, state, OPTIONS)
    assert [(one.id, one.quarantined, one.final) for one in gone.evicted] == [
        (0, False, True),
        (1, False, True),
    ]
    assert gone.state.tables == ()


def test_what_was_waited_for_before_a_loss_counts_no_more() -> None:
    state = two_inside(3)
    waiting = report(state, 0, [1, 2], awaits_s=9.0)
    state = hearing.reported(state, 1.0, 0, waiting)
    decision = decide(1.0, state, OPTIONS)
    assert [gone.id for gone in decision.evicted] == [1]
    # A report that was on its way says the same again, and member 2 has only just been given the lost units.
    late = hearing.reported(decision.state, 1.1, 0, waiting)
    assert decide(1.1, late, OPTIONS).evicted == ()
