"""What the worker does with processes and with what they leave, as tables."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from tpu.worker.fate import (
    GIVEN_UP,
    KILL_S,
    LIVES,
    RESTARTED,
    RESTARTED_BY_AUTOMATION,
    TAKEN_FOR_DEAD,
    Act,
    End,
    Seen,
    act,
    begun,
    cancelled_unheard,
    end,
    may_begin,
    restarted,
    taken_for_dead,
    to_end,
    unwanted,
)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Seen(alive=True, begun=True, unwanted_s=None), "wait"),
        (Seen(alive=True, begun=False, unwanted_s=None), "wait"),
        (Seen(alive=True, begun=True, unwanted_s=0.0), "ask"),
        (Seen(alive=True, begun=True, unwanted_s=KILL_S), "kill"),
        # It has nothing to save, and nobody would hear the question.
        (Seen(alive=True, begun=False, unwanted_s=0.0), "kill"),
        (Seen(alive=False, begun=True, unwanted_s=None), "ended"),
        (Seen(alive=False, begun=False, unwanted_s=KILL_S), "ended"),
    ],
)
def test_a_flow_is_asked_to_end_and_killed_if_it_does_not(seen: Seen, expected: Act):
    assert act(seen) == expected


def again(message: str = RESTARTED) -> State:
    return AwaitingRetry(message=message)


BY_ITSELF = (RESTARTED, RESTARTED_BY_AUTOMATION)
# A flow run that was started, and started again by itself three times.
STARTED = [Scheduled(), Pending(), Running()]
FOUR_STARTS = [*STARTED, *[state for _ in range(3) for state in (again(), Pending(), Running())]]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([Running(), Completed()], "leave"),
        ([Running(), Failed()], "leave"),
        ([Running(), Cancelling(), Cancelled()], "leave"),
        ([Running(), Crashed(name=GIVEN_UP)], "leave"),
        (None, "leave"),
        ([Running(), Cancelling()], "cancelled"),
        ([Pending(), Cancelling()], "cancelled"),
        # Its end was taken for a crash, but nobody wants it any more.
        ([Running(), Cancelling(), Crashed()], "cancelled"),
        # Somebody has asked for it since.
        (
            [Scheduled(), Pending(), Running(), Cancelling(), Cancelled(), Scheduled(), Pending(), Running()],
            "again",
        ),
        ([Running(), AwaitingRetry()], "again later"),
        ([Pending(), Running()], "again"),
        ([Running(), Crashed()], "again"),
        (FOUR_STARTS[:-3], "again"),
        (FOUR_STARTS, "given up"),
        ([*FOUR_STARTS, Crashed()], "given up"),
        # It never began: another start would end as this one did, for ever.
        ([Pending()], "given up"),
        ([Pending(), Crashed()], "given up"),
    ],
)
def test_a_flow_run_whose_processes_are_gone(history: list[State] | None, expected: End):
    assert end(history, restarts=3) == expected


def test_processes_that_were_given_up_are_no_reason_to_touch_a_flow_run_that_others_have_started_since():
    claim = Pending()
    before = [Scheduled(), claim, Running()]
    for since in (
        [again(RESTARTED_BY_AUTOMATION)],
        [again(), Pending(), Running()],
        [again(), Pending(), Completed()],
    ):
        assert end([*before, Crashed(), *since], 3, claim.id) == "again later"
    # While it waits nobody else is there to end what is left of it.
    assert end([*before, again(), Cancelling()], 3, claim.id) == "cancelled"
    # The automation was wrong, and it is ours as before.
    assert (
        end([*before, Crashed(), again(RESTARTED_BY_AUTOMATION), Running(message=LIVES)], 3, claim.id)
        == "again"
    )
    assert end(before, 3, claim.id) == "again"


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([Scheduled(), Pending()], True),
        ([Scheduled(), State(type=StateType.SCHEDULED, name="Late"), Pending()], True),
        (FOUR_STARTS[:-1], True),
        ([*FOUR_STARTS, Crashed(), again(RESTARTED_BY_AUTOMATION), Pending()], False),
        # A person may start it again as often as they like.
        (
            [*FOUR_STARTS, Crashed(name=GIVEN_UP), AwaitingRetry(message="Retry from the UI"), Pending()],
            True,
        ),
        # Whoever was to end it is dead, too.
        ([Scheduled(), Pending(), Running(), Cancelling(), Crashed(), again(), Pending()], False),
        ([Scheduled(), Pending(), Cancelling(), Cancelled(), Scheduled(), Pending()], True),
    ],
)
def test_a_flow_run_that_was_claimed(history: list[State], expected: bool):
    assert may_begin(history, restarts=3) is expected


@pytest.mark.parametrize("message", BY_ITSELF)
def test_a_flow_run_that_was_taken_for_dead_by_mistake_has_not_used_up_a_restart(message: str):
    mistake = [Crashed(), again(message), Running(message=LIVES)]
    late = [Crashed(), again(message), Pending(), Running(message=LIVES)]
    history = [Scheduled(), Pending(), Running(), *mistake, *late, *mistake]
    assert restarted(history) == 0
    assert restarted([*history, again(), Pending(), Running(), *mistake]) == 1


def test_what_lives_though_an_automation_took_it_for_dead_is_said_to_live():
    for state in (Crashed(message=TAKEN_FOR_DEAD), again(RESTARTED_BY_AUTOMATION)):
        assert taken_for_dead([Running(), state])
    for state in (Running(), Running(message=LIVES), Crashed(message="killed"), again(), Completed()):
        assert not taken_for_dead([Running(), state])
    assert act(Seen(True, True, None, taken_for_dead=True)) == "say that it lives"
    assert act(Seen(False, True, None, taken_for_dead=True)) == "ended"


def test_only_a_cancellation_takes_the_right_to_live():
    assert [unwanted(state) for state in (None, Running(), Crashed(), Cancelling(), Cancelled())] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_a_suspended_flow_run_saves_and_ends_and_others_go_on_with_it_when_it_is_resumed():
    assert to_end(Suspended())
    assert not to_end(Running())
    suspended = [Scheduled(), Pending(), Running(), Suspended()]
    assert act(Seen(alive=True, begun=begun(suspended), unwanted_s=0.0)) == "ask"
    assert end(suspended, restarts=3) == "leave"
    # Resumed while it still saved: whoever claims it next sees to it.
    assert end([*suspended, Scheduled(name="Resuming")], restarts=3) == "again later"
    assert may_begin([*suspended, Scheduled(name="Resuming"), Pending()], restarts=0)
    # Nor is one that runs again taken for one that somebody cancelled.
    assert not cancelled_unheard([*suspended, Running()])


def test_a_start_that_the_workers_death_cut_short_is_made_again():
    assert end([Pending()], restarts=3, cut_short=True) == "again"
    assert end([Pending(), Cancelling()], restarts=3, cut_short=True) == "cancelled"


@pytest.mark.parametrize(
    ("history", "runs", "unheard"),
    [
        ([], False, False),
        ([Pending(), Cancelling()], False, False),
        ([Pending(), Running()], True, False),
        ([Pending(), Running(), Cancelling()], True, False),
        # The server let it begin: its cancellation would be lost.
        ([Pending(), Cancelling(), Running()], True, True),
        ([Pending(), Cancelled(), Running()], True, True),
        # It ran before, but this start of it has not begun.
        ([Running(), Crashed(), AwaitingRetry(), Pending(), Cancelling()], False, False),
        ([Cancelling(), Cancelled(), AwaitingRetry(), Pending(), Running()], True, False),
    ],
)
def test_what_a_history_tells_of_the_newest_start(history: list[State], runs: bool, unheard: bool):
    assert (begun(history), cancelled_unheard(history)) == (runs, unheard)
