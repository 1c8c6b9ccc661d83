"""Budgets: preemption and failure never share one, and waiting grows with repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.slices.budget import Allowed, Budgets, Exhausted, allows, back_off_s, spent
from tpu.slices.verdict import VerdictKind

K = VerdictKind
failing = st.sampled_from([K.PREEMPTED, K.INFRASTRUCTURE, K.USER_FAILURE])


@pytest.mark.parametrize(
    ("verdicts", "allowed"),
    [
        ([], True),
        ([K.PREEMPTED], True),
        ([K.USER_FAILURE], True),
        ([K.USER_FAILURE] * 2, True),
        ([K.USER_FAILURE] * 3, False),
        ([K.INFRASTRUCTURE] * 20, True),
        ([K.INFRASTRUCTURE] * 21, False),
        ([K.USER_FAILURE, K.PREEMPTED, K.USER_FAILURE, K.PREEMPTED, K.USER_FAILURE], False),
        ([K.USER_FAILURE] * 3 + [K.PREEMPTED], True),
        ([K.FINISHED], False),
        ([K.CANCELLED], False),
    ],
)
def test_the_default_budgets(verdicts: list[VerdictKind], allowed: bool) -> None:
    assert isinstance(allows(Budgets(), verdicts), Allowed) == allowed


def test_P7_a_hundred_preemptions_charge_nothing_else() -> None:
    history = [K.PREEMPTED] * 100
    assert allows(Budgets(), history) == Allowed(0.0)
    assert allows(Budgets(infrastructure=0, user_failure=0), history) == Allowed(0.0)
    assert isinstance(allows(Budgets(), [*history, K.USER_FAILURE]), Allowed)
    assert spent(history) == {kind: 100 if kind is K.PREEMPTED else 0 for kind in K}


def test_an_exhausted_budget_says_which_and_how_much() -> None:
    answer = allows(Budgets(preemption=1), [K.PREEMPTED, K.PREEMPTED])
    assert isinstance(answer, Exhausted)
    assert "2 times preempted" in answer.reason
    assert "is 1" in answer.reason


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="user_failure"):
        Budgets(user_failure=-1)


@given(st.lists(failing, max_size=60), failing)
def test_only_its_own_kind_uses_a_budget_up(history: list[VerdictKind], last: VerdictKind) -> None:
    budgets = Budgets(preemption=5, infrastructure=5, user_failure=5)
    answer = allows(budgets, [*history, last])
    assert isinstance(answer, Exhausted) == (history.count(last) + 1 > 5)


@given(st.lists(failing, min_size=1, max_size=3000))
def test_waiting_never_shrinks_in_a_row_and_has_an_end(history: list[VerdictKind]) -> None:
    wait = back_off_s(history)
    assert 0 <= wait <= 300
    assert back_off_s([*history, history[-1]]) >= wait
    if history[-1] is K.PREEMPTED:
        assert wait == 0


def test_waiting_doubles_and_starts_again_after_something_else() -> None:
    waits = [back_off_s([K.USER_FAILURE] * n) for n in range(0, 5)]
    assert waits == [0, 1, 2, 4, 8]
    assert back_off_s([K.USER_FAILURE, K.USER_FAILURE, K.PREEMPTED, K.USER_FAILURE]) == 1
    assert back_off_s([K.PREEMPTED] * 2000) == 0
    assert back_off_s([K.INFRASTRUCTURE] * 2000) == 300


def test_a_single_lost_host_is_replaced_at_once() -> None:
    waits = [back_off_s([K.INFRASTRUCTURE] * n) for n in range(1, 5)]
    assert waits == [0, 1, 2, 4]
    assert back_off_s([K.INFRASTRUCTURE, K.INFRASTRUCTURE, K.PREEMPTED, K.INFRASTRUCTURE]) == 0
