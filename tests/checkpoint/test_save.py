"""Saving beside the training: what blocks, what is joined, what happens when it cannot be done."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.checkpoint.bucket import Bucket, committed_steps, opened, wait_until
from tests.checkpoint.faults import FaultyGcs
from tests.checkpoint.saving import QUICK, Events, assert_holds, save_steps, saver_of, state_at
from tpu.checkpoint import files
from tpu.checkpoint.fence import FencedOut, load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.checkpoint.restore import restore
from tpu.checkpoint.retry import RetryPolicy, StorageUnavailable
from tpu.checkpoint.save import (
    DivergedError,
    PartsMissing,
    SaveFailed,
    SaveLimits,
    Saver,
    SaveTarget,
    is_infrastructure,
)
from tpu.checkpoint.shards import Shard
from tpu.checkpoint.tree import UnsavableState, leaves_of


def test_the_state_may_change_while_it_is_saved(bucket: Bucket):
    run_dir = bucket.new_run()
    state = state_at(10)
    with saver_of(run_dir) as saver:
        saver.save(10, leaves_of(state))
        state["params"]["w"][:] = -1
        saver.wait()
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert_holds(restored.arrays, 10)


def test_commits_that_come_close_are_joined(bucket: Bucket):
    """GCS takes about one change a second of one object."""
    run_dir, events, changes = bucket.new_run(), Events(), []
    saver = Saver(SaveTarget(run_dir, 1), events, lambda: changes.append(committed_steps(run_dir)))
    for step in range(1, 9):
        saver.save(step, leaves_of(state_at(step)))
    saver.wait()
    saver.close()
    assert committed_steps(run_dir) == list(range(1, 9))
    assert [c["step"] for c in events.of("commit")] == list(range(1, 9))
    assert len(changes) <= 3


def test_P9_an_attempt_that_was_closed_cannot_commit(bucket: Bucket):
    run_dir, events = bucket.new_run(), Events()
    with saver_of(run_dir, events=events) as saver:
        saver.save(10, leaves_of(state_at(10)))
        saver.wait()
        opened(run_dir, 2)
        saver.save(20, leaves_of(state_at(20)))
        with pytest.raises(FencedOut, match="attempt 2"):
            saver.wait()
        with pytest.raises(FencedOut):  # and it stays so
            saver.save(30, leaves_of(state_at(30)))
    assert committed_steps(run_dir) == [10]
    assert events.of("save_refused")


def test_P9_every_process_of_a_closed_attempt_stops(bucket: Bucket):
    run_dir = bucket.new_run()
    opened(run_dir, 2)
    with saver_of(run_dir, process=1, processes=2) as saver:
        saver.save(10, leaves_of(state_at(10)))
        with pytest.raises(FencedOut):
            saver.wait()
    assert files.names(checkpoint_url(run_dir, 10, 1)) == []


def test_two_processes_write_one_checkpoint(bucket: Bucket):
    run_dir, whole = bucket.new_run(), np.arange(12, dtype=np.float32).reshape(6, 2)
    with saver_of(run_dir, 1, 0, 2) as first, saver_of(run_dir, 1, 1, 2) as second:
        first.save(5, {"params/w": Shard(whole[:4], (0, 0), (6, 2)), "count": 5})
        assert committed_steps(run_dir) == []
        second.save(5, {"params/w": Shard(whole[4:], (4, 0), (6, 2)), "count": 5})
        first.wait()
        second.wait()
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert restored.manifest.processes == 2
    np.testing.assert_array_equal(restored.arrays["params/w"], whole)


def test_C1_without_a_part_of_every_host_nothing_is_committed(bucket: Bucket):
    run_dir, events = bucket.new_run(), Events()
    limits = SaveLimits(commit_interval_s=0, parts_deadline_s=0.3, parts_poll_s=0.01)
    with saver_of(run_dir, 1, 0, 2, events=events, limits=limits) as saver:
        saver.save(5, leaves_of(state_at(5)))
        with pytest.raises(SaveFailed, match=r"host-1\.json"):
            saver.wait()
    assert committed_steps(run_dir) == []
    assert events.of("save_failed")


def test_C1_a_part_of_another_attempt_does_not_count(bucket: Bucket):
    run_dir = bucket.new_run()
    with saver_of(run_dir, 1, 1, 2) as old:
        old.save(5, leaves_of(state_at(5)))
        old.wait()
    opened(run_dir, 2)
    limits = SaveLimits(commit_interval_s=0, parts_deadline_s=0.3, parts_poll_s=0.01)
    with saver_of(run_dir, 2, 0, 2, limits=limits) as saver:
        saver.save(5, leaves_of(state_at(5)))
        with pytest.raises(SaveFailed):
            saver.wait()


def test_C1_pieces_that_leave_a_gap_are_not_committed(bucket: Bucket):
    run_dir = bucket.new_run()
    with saver_of(run_dir) as saver:
        saver.save(5, {"params/w": Shard(np.zeros((2, 2), np.float32), (0, 0), (6, 2))})
        with pytest.raises(SaveFailed, match="'params/w' have 4 elements, the array has 12"):
            saver.wait()
    assert committed_steps(run_dir) == []


def test_C10_a_state_with_nan_is_not_saved(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    state = state_at(20)
    state["params"]["w"][1, 2] = np.nan
    with saver_of(run_dir) as saver:
        saver.save(20, leaves_of(state))
        with pytest.raises(DivergedError, match=r"step 20.*params/w"):
            saver.wait()
    assert committed_steps(run_dir) == [10]


def test_C7_503s_are_tried_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    run_dir, events = bucket.new_run(), Events()
    with FaultyGcs(bucket.url) as faulty:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", faulty.url)
        faulty.fail_next(2, 503)
        with saver_of(run_dir, events=events) as saver:
            saver.save(10, leaves_of(state_at(10)))
            saver.wait()
        assert faulty.failed == 2
    assert committed_steps(run_dir) == [10]
    assert not events.of("save_failed")


def test_C7_training_goes_on_and_the_next_save_tries_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """The bucket refuses for longer than a save's patience; then the rights come back."""
    run_dir, events = bucket.new_run(), Events()
    with FaultyGcs(bucket.url) as faulty:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", faulty.url)
        limits = SaveLimits(RetryPolicy(deadline_s=0.5, first_s=0.1), commit_interval_s=0)
        with saver_of(run_dir, events=events, limits=limits) as saver:
            faulty.fail_always(403)
            saver.save(10, leaves_of(state_at(10)))
            wait_until(lambda: bool(events.of("save_failed")), "the failed save to be said")
            saver.check()  # raises nothing: the training goes on
            faulty.fail_always(None)
            saver.save(20, leaves_of(state_at(20)))
            saver.wait()
    assert committed_steps(run_dir) == [20]


def test_C7_a_commit_that_failed_is_made_with_the_next(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    run_dir, events = bucket.new_run(), Events()
    with FaultyGcs(bucket.url) as faulty:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", faulty.url)
        with saver_of(run_dir, events=events) as saver:
            faulty.fail_always(403, path="fence.json")
            saver.save(10, leaves_of(state_at(10)))
            with pytest.raises(SaveFailed):
                saver.wait()
            faulty.fail_always(None)
            saver.save(20, leaves_of(state_at(20)))
            saver.wait()
    assert committed_steps(run_dir) == [10, 20]


def test_C7_a_lost_answer_does_not_commit_twice_or_refuse(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    """The fence was changed, but the answer never came: asked again, the change is there already."""
    run_dir = bucket.new_run()
    with FaultyGcs(bucket.url) as faulty:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", faulty.url)
        faulty.lose_answers(1, path="/upload/", containing=b"fence.json")
        with saver_of(run_dir) as saver:
            saver.save(10, leaves_of(state_at(10)))
            saver.wait()
        assert faulty.failed == 1
    assert committed_steps(run_dir) == [10]


def test_saves_that_outrun_the_upload_block(bucket: Bucket):
    """No more than two snapshots lie in memory."""
    run_dir, release, done = bucket.new_run(), threading.Event(), threading.Event()
    saver = Saver(SaveTarget(run_dir, 1), Events(), lambda: (release.wait(30), None)[1], QUICK)

    def save_three() -> None:
        for step in (1, 2, 3):
            saver.save(step, leaves_of(state_at(step)))
        done.set()

    thread = threading.Thread(target=save_three)
    thread.start()
    assert not done.wait(0.3)
    release.set()
    assert done.wait(20)
    thread.join()
    saver.close()
    assert committed_steps(run_dir) == [1, 2, 3]


def test_C7_who_is_to_blame():
    """What the bucket or another host did is not charged to the program; lost rights are for a person to mend."""

    def failed_by(cause: Exception) -> SaveFailed:
        failure = SaveFailed("step 5")
        failure.__cause__ = cause
        return failure

    assert is_infrastructure(StorageUnavailable("503"))
    assert is_infrastructure(failed_by(StorageUnavailable("503")))
    assert is_infrastructure(failed_by(PartsMissing("host-1.json")))
    assert not is_infrastructure(failed_by(OSError("Forbidden")))
    assert not is_infrastructure(RuntimeError("the user's"))
    assert not is_infrastructure(None)


def test_what_cannot_be_saved_is_named(bucket: Bucket):
    with pytest.raises(UnsavableState, match="'name' is a str"):
        leaves_of({"name": "x"})
    with pytest.raises(UnsavableState, match="'a/b'"):
        leaves_of({"a": {"b": 1}, "a/b": 2})
