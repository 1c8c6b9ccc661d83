import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.runs.event_log import RunEvent
from tpu.runs.goodput import BUCKETS, Interval, attempt_intervals, partition, run_intervals, waste_begins

times = st.floats(-100, 1100, allow_nan=False)
intervals = st.lists(
    st.builds(lambda b, s, t: Interval(b, min(s, t), max(s, t)), st.sampled_from(BUCKETS), times, times),
    max_size=30,
)


@given(intervals, st.floats(0, 500), st.floats(0, 500))
def test_every_second_is_in_exactly_one_bucket(intervals, start, length):
    seconds = partition(intervals, start, start + length)
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(length, abs=1e-6)


def test_a_second_in_which_a_step_runs_is_step_time():
    seconds = partition(
        [Interval("provisioning", 0, 10), Interval("step", 4, 6), Interval("sync", 9, 12)], 0, 15
    )
    assert seconds["step"] == 2
    assert seconds["provisioning"] == 8
    assert seconds["sync"] == 2
    assert seconds["other"] == 3


def test_steps_behind_the_last_commit_are_waste():
    steps = [(10.0, 10), (20.0, 20), (30.0, 30)]
    assert waste_begins(steps, 30, 35) is None
    assert waste_begins(steps, 20, 35) == 20
    assert waste_begins(steps, 25, 35) == 25
    assert waste_begins(steps, 0, 35) == 10
    assert attempt_intervals([(0, "restore"), (5, "step")], 35, 25) == [
        Interval("restore", 0, 5), Interval("step", 5, 25), Interval("wasted", 25, 35),
    ]  # fmt: skip


def test_an_attempt_that_never_said_a_word_claims_no_second():
    assert attempt_intervals([], 35, None) == []


def test_a_run_with_a_preemption():
    def attempt(number, at, phases, ended, waste):
        return [
            RunEvent(at, "attempt-started", {"attempt": number}),
            RunEvent(ended, "attempt-ended", {"phases": phases, "ended": ended, "waste_from": waste}),
        ]

    events = [
        RunEvent(0, "driver-started", {}),
        RunEvent(1, "provision-started", {}),
        RunEvent(4, "slice-ready", {}),
        RunEvent(4, "sync-started", {}),
        RunEvent(5, "sync-done", {}),
        *attempt(1, 5, [(6, "start"), (8, "compile"), (10, "step")], 20, 18),
        RunEvent(20, "provision-started", {}),
        RunEvent(21, "provision-failed", {}),
        *attempt(2, 22, [(23, "restore"), (24, "step")], 40, None),
    ]
    seconds = partition(run_intervals(events), 0, 40)
    assert seconds == {
        "step": 8 + 16, "wasted": 2, "provisioning": 4, "sync": 1, "start": 3 + 1, "restore": 1, "compile": 2,
        "save": 0, "evaluation wait": 0, "idle": 0, "other": 2,
    }  # fmt: skip
