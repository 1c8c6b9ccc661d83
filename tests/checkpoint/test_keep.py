"""Old checkpoints go by the rule; the newest two that verify never do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.bucket import Bucket, committed_steps, opened
from tests.checkpoint.saving import assert_holds, save_steps
from tpu.checkpoint import files
from tpu.checkpoint.fence import Commit, FencedOut, load_fence
from tpu.checkpoint.keep import KEEP_ALL, KeepRule, Pruner, outdated
from tpu.checkpoint.paths import checkpoint_url
from tpu.checkpoint.restore import restore


def commits(*steps: int) -> list[Commit]:
    return [Commit(step, 1, "00000000") for step in steps]


TABLE = [
    ("without a rule all stay", KEEP_ALL, [10, 20, 30, 40], []),
    ("the last two", KeepRule(last=2), [10, 20, 30, 40], [10, 20]),
    ("the last, but two are always safe", KeepRule(last=1), [10, 20, 30, 40], [10, 20]),
    ("every 20 and the last two", KeepRule(last=2, every=20), [10, 20, 30, 40, 50], [10, 30]),
    ("every 100, of which there is none yet", KeepRule(every=100), [10, 20, 30], [10]),
    ("fewer than the rule keeps", KeepRule(last=9), [10, 20], []),
]


@pytest.mark.parametrize(("story", "rule", "steps", "gone"), TABLE, ids=[row[0] for row in TABLE])
def test_C8_rule(story, rule, steps, gone):
    assert [c.step for c in outdated(commits(*steps), rule, commits(*steps))] == gone


def test_C8_damaged_ones_do_not_count_as_safe():
    assert [c.step for c in outdated(commits(10, 20, 30, 40), KeepRule(last=1), commits(10, 20))] == [30]


@given(
    st.sets(st.integers(1, 200), max_size=12),
    st.sets(st.integers(1, 200), max_size=12),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 50),
)
def test_C8_the_newest_two_verified_are_never_deleted(steps, whole, last, every):
    everything = commits(*steps)
    verified = [c for c in everything if c.step in whole]
    gone = set(outdated(everything, KeepRule(last, every), verified))
    assert not gone & set(sorted(verified)[-2:])


def test_C8_old_checkpoints_go_while_training(bucket: Bucket):
    run_dir = bucket.new_run()
    events = save_steps(run_dir, 10, 20, 30, 40, 50, keep=KeepRule(last=2, every=30))
    assert committed_steps(run_dir) == [30, 40, 50]
    for step in (10, 20):
        assert files.names(checkpoint_url(run_dir, step, 1)) == []
    assert [e["steps"] for e in events.of("dropped")] == [[10], [20]]


def test_C8_a_damaged_newest_does_not_cost_the_last_good_ones(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10, 20, 30, 40)
    for step in (30, 40):
        path = bucket.file(f"{checkpoint_url(run_dir, step, 1)}/shards-0-0.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    Pruner(run_dir, 1, KeepRule(last=1)).prune(load_fence(run_dir))
    assert committed_steps(run_dir) == [10, 20, 40]
    restored = restore(run_dir, load_fence(run_dir))
    assert restored is not None
    assert_holds(restored.arrays, 20)


def test_C8_leftovers_of_closed_attempts_go_with_them(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10)
    files.write(f"{checkpoint_url(run_dir, 15, 1)}/shards-0-0.safetensors", b"died while saving")
    opened(run_dir, 2)
    files.write(f"{checkpoint_url(run_dir, 99, 2)}/shards-0-0.safetensors", b"is being saved")
    save_steps(run_dir, 20, 30, attempt=2, keep=KeepRule(last=2))
    assert committed_steps(run_dir) == [20, 30]
    assert files.names(checkpoint_url(run_dir, 15, 1)) == []
    assert files.names(checkpoint_url(run_dir, 99, 2)) != []


def test_P9_a_closed_attempt_deletes_nothing(bucket: Bucket):
    run_dir = bucket.new_run()
    save_steps(run_dir, 10, 20, 30)
    fence = load_fence(run_dir)
    opened(run_dir, 2)
    with pytest.raises(FencedOut):
        Pruner(run_dir, 1, KeepRule(last=1)).prune(fence)
    assert committed_steps(run_dir) == [10, 20, 30]


def test_C8_a_wrong_rule_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        KeepRule(last=0)
    with pytest.raises(ValueError, match="unknown"):
        KeepRule.from_json('{"newest": 3}')
