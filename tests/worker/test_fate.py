"""What the worker does with processes and with what they leave, as tables."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running

from tpu.worker.fate import KILL_S, Act, End, Seen, act, begun, cancelled_unheard, end, unwanted


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


@pytest.mark.parametrize(
    ("history", "starts", "expected"),
    [
        ([Running(), Completed()], 1, "leave"),
        ([Running(), Failed()], 1, "leave"),
        ([Running(), Cancelling(), Cancelled()], 1, "leave"),
        (None, 1, "leave"),
        ([Running(), Cancelling()], 1, "cancelled"),
        ([Pending(), Cancelling()], 0, "cancelled"),
        # Its end was taken for a crash, but nobody wants it any more.
        ([Running(), Cancelling(), Crashed()], 1, "cancelled"),
        ([Running(), AwaitingRetry()], 2, "again later"),
        ([Pending(), Running()], 1, "again"),
        ([Running(), Crashed()], 3, "again"),
        ([Running()], 4, "crashed"),
        ([Running(), Crashed()], 4, "leave"),
        # It never began: another start would end as this one did, for ever.
        ([Pending()], 0, "crashed"),
        ([Pending(), Crashed()], 0, "leave"),
        # Cancelled, then started again by somebody: that start was killed, and nobody cancelled it.
        ([Running(), Cancelling(), Cancelled(), AwaitingRetry(), Running()], 2, "again"),
    ],
)
def test_a_flow_run_whose_processes_are_gone(history: list[State] | None, starts: int, expected: End):
    assert end(history, starts, restarts=3) == expected


def test_only_a_cancellation_takes_the_right_to_live():
    assert [unwanted(state) for state in (None, Running(), Crashed(), Cancelling(), Cancelled())] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_a_start_that_the_workers_death_cut_short_is_made_again():
    assert end([Pending()], 0, restarts=3, cut_short=True) == "again"
    assert end([Pending(), Cancelling()], 0, restarts=3, cut_short=True) == "cancelled"


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
