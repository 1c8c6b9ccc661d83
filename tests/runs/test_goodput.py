from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs.histories import at, attempt_ended, histories, intended, leased
from tpu.runs.goodput import (
    BUCKETS,
    Interval,
    attempt_intervals,
    partition,
    pieces,
    run_intervals,
    waste_begins,
)

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
    cut = pieces(intervals, start, start + length)
    assert [piece.end for piece in cut[:-1]] == [piece.start for piece in cut[1:]]
    assert all(a.bucket != b.bucket for a, b in pairwise(cut))


@given(histories(), st.floats(0, 100))
def test_any_history_sums_to_the_wall_time(events, later):
    begin = events[0].time if events else 0.0
    end = (events[-1].time if events else 0.0) + later
    seconds = partition(run_intervals(events), begin, end)
    assert sum(seconds.values()) == pytest.approx(end - begin, abs=1e-4)
    assert all(value >= 0 for value in seconds.values())


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
    assert waste_begins(steps, 30) is None
    assert waste_begins(steps, 20) == 20
    assert waste_begins(steps, 25) == 25
    assert waste_begins(steps, 0) == 10
    assert attempt_intervals([(0, "restore"), (5, "step")], 35, 25) == [
        Interval("restore", 0, 5), Interval("step", 5, 25), Interval("wasted", 25, 35),
    ]  # fmt: skip


def test_an_attempt_that_never_said_a_word_claims_no_second():
    assert attempt_intervals([], 35, None) == []


def spent(*events, until):
    """Seconds of the buckets that have any."""
    return {k: v for k, v in partition(run_intervals(events), 0, until).items() if v}


def test_a_run_with_a_preemption():
    def attempt(number, begin, phases, ended, waste):
        return [
            at(begin, "attempt-started", attempt=number),
            attempt_ended(ended, number, phases=phases, waste_from=waste),
        ]

    assert spent(
        at(0, "driver-started"),
        at(1, "slice-wanted"),
        at(4, "slice-ready"),
        at(4, "sync-started"),
        at(5, "sync-done"),
        *attempt(1, 5, [(6, "start"), (8, "compile"), (10, "step")], 20, 18),
        intended(20, "b"),
        at(21, "provision-failed", slice="b"),
        *attempt(2, 22, [(23, "restore"), (24, "step")], 40, None),
        until=40,
    ) == {
        "step": 8 + 16, "wasted": 2, "provisioning": 4, "sync": 1, "start": 3 + 1, "restore": 1, "compile": 2,
        "other": 2,
    }  # fmt: skip


def test_from_a_loss_to_the_next_slice_is_provisioning_also_while_the_cloud_refuses():
    assert spent(
        at(0, "attempt-started", attempt=1),
        attempt_ended(10, 1, phases=[(0, "step")]),
        at(12, "slice-deleted", slice="a"),
        intended(13, "b"),
        at(14, "provision-failed", slice="b"),
        at(14, "slice-deleted", slice="b"),
        intended(24, "c"),
        at(30, "slice-ready", slice="c"),
        until=31,
    ) == {"step": 10, "provisioning": 20, "other": 1}


def test_the_clean_up_of_a_run_that_needs_no_other_slice_is_not_provisioning():
    ended = attempt_ended(10, 1, phases=[(0, "step")], verdict="finished")
    assert spent(
        at(0, "attempt-started", attempt=1), ended, at(15, "slice-deleted", slice="a"), until=16
    ) == {"step": 10, "other": 6}


@pytest.mark.parametrize("wanted", [[], [at(1, "slice-wanted")]])
def test_the_wait_for_a_slice_of_the_pool_is_provisioning(wanted):
    assert spent(at(1, "driver-started"), *wanted, leased(9, "a", [0]), until=10) == {
        "provisioning": 8,
        "other": 2,
    }


def test_who_wants_a_slice_is_provisioning_until_it_has_one_whatever_is_refused():
    assert spent(
        at(0, "slice-wanted"), intended(1, "a"), at(2, "provision-failed", slice="a"),
        at(2, "slice-deleted", slice="a"), intended(30, "b"), intended(30, "c"), at(40, "slice-ready", slice="b"),
        at(41, "provision-failed", slice="c"), at(41, "sync-started"), at(45, "sync-done"), until=45,
    ) == {"provisioning": 41, "sync": 4}  # fmt: skip
    # One that gives up waiting has waited to the end.
    assert spent(at(0, "slice-wanted"), at(60, "evaluation-wait-started"), until=60) == {"provisioning": 60}


def test_a_slice_of_the_pool_after_a_loss():
    ended = attempt_ended(10, 1, phases=[(0, "step")])
    released = at(11, "slice-released", slice="a", why="gone")
    assert spent(at(0, "attempt-started", attempt=1), ended, released, leased(30, "b", [0]), until=30) == {
        "step": 10,
        "provisioning": 20,
    }


def test_the_wait_for_a_slice_in_repair_is_provisioning():
    assert spent(
        at(0, "attempt-started", attempt=1), attempt_ended(10, 1, phases=[(0, "step")]),
        at(11, "repair-wait-started", slice="a"), at(50, "repair-wait-done", slice="a", ready=True), until=51,
    ) == {"step": 10, "provisioning": 40, "other": 1}  # fmt: skip


def test_a_pause_before_another_attempt_is_idle():
    assert spent(
        at(0, "attempt-started", attempt=1),
        attempt_ended(10, 1, phases=[(0, "step")]),
        at(12, "slice-deleted", slice="a"),
        at(12, "back-off", seconds=8),
        intended(20, "b"),
        at(25, "slice-ready", slice="b"),
        until=25,
    ) == {"step": 10, "provisioning": 2 + 5, "idle": 8}


def test_of_several_slices_the_last_one_ends_the_provisioning():
    assert spent(
        intended(0, "a"), intended(0, "b"), at(3, "slice-ready", slice="a"), at(9, "slice-ready", slice="b"),
        until=10,
    ) == {"provisioning": 9, "other": 1}  # fmt: skip


def test_while_nobody_drives_a_run_it_is_idle_but_for_its_gang():
    stopped = [at(0, "driver-started"), at(1, "evaluation-wait-started"), at(3, "evaluation-wait-done")]
    assert spent(*stopped, at(63, "driver-started"), until=64) == {
        "evaluation wait": 2,
        "idle": 60,
        "other": 2,
    }
    waited = [
        at(0, "slice-wanted"),
        intended(1, "a"),
        at(3, "slice-deleted", slice="a"),
        at(63, "driver-started"),
    ]
    assert spent(*waited, until=64) == {"provisioning": 3, "idle": 60, "other": 1}
    alone = [at(0, "attempt-started", attempt=1), at(50, "driver-started")]
    assert spent(*alone, attempt_ended(60, 1, phases=[(1, "step")]), until=60) == {"start": 1, "step": 59}


def test_a_creation_goes_on_while_its_driver_is_dead():
    assert spent(intended(0, "a"), at(50, "driver-started"), at(60, "slice-ready", slice="a"), until=60) == {
        "provisioning": 60
    }


def test_of_a_gang_that_ended_unwatched_nothing_is_claimed():
    assert spent(at(0, "attempt-started", attempt=1), attempt_ended(60, 1, reached=None), until=60) == {
        "other": 60
    }
    # One that was watched and died before its program's first sign has spent it on its start.
    assert spent(at(0, "attempt-started", attempt=1), attempt_ended(60, 1), until=60) == {"start": 60}


def test_a_preparation_that_failed_has_been_what_it_was():
    assert spent(
        at(0, "sync-started"), attempt_ended(7, None, reached=None), intended(9, "b"),
        at(12, "slice-ready", slice="b"), until=12,
    ) == {"sync": 7, "provisioning": 5}  # fmt: skip
