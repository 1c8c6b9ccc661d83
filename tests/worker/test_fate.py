"""What the worker does with processes and with what they leave, as tables."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running

from tpu.worker.fate import KILL_S, Act, End, Seen, act, end, unwanted


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Seen(alive=True, unwanted_s=None), "wait"),
        (Seen(alive=True, unwanted_s=KILL_S - 1), "wait"),
        (Seen(alive=True, unwanted_s=KILL_S), "kill"),
        (Seen(alive=False, unwanted_s=None), "ended"),
        (Seen(alive=False, unwanted_s=KILL_S), "ended"),
    ],
)
def test_processes_that_a_cancellation_does_not_end_are_killed(seen: Seen, expected: Act):
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
    ],
)
def test_a_flow_run_whose_processes_are_gone(history: list[State] | None, starts: int, expected: End):
    assert end(history, starts, restarts=3) == expected


def test_only_a_cancellation_takes_the_right_to_live():
    assert [unwanted(state) for state in (None, Running(), Crashed(), Cancelling(), Cancelled())] == [
        False, False, False, True, True,
    ]  # fmt: skip
