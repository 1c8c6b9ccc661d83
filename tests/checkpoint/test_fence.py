"""The decisions about fence.json, by table and by any order of events; and the compare-and-set of the real thing."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.bucket import Bucket
from tpu.checkpoint import objects
from tpu.checkpoint.fence import (
    Commit,
    Fence,
    FencedOut,
    MalformedFence,
    Refused,
    add_commit,
    add_commits,
    close_attempt,
    drop_commits,
    from_json,
    load_fence,
    open_attempt,
    to_json,
    update_fence,
)

A1 = Commit(100, 1, "aaaaaaaa")
A2 = Commit(200, 1, "bbbbbbbb")
B2 = Commit(150, 2, "cccccccc")
OPEN_1 = Fence(1, True)

TABLE = [
    ("the first attempt opens", lambda: open_attempt(Fence(), 1), Fence(1, True)),
    ("the open attempt opens again", lambda: open_attempt(OPEN_1, 1), OPEN_1),
    (
        "a later attempt closes the open one",
        lambda: open_attempt(Fence(1, True, (A1,)), 3),
        Fence(3, True, (A1,), {1: A1}),
    ),
    ("an attempt closes without a commit", lambda: close_attempt(OPEN_1), Fence(1, False, (), {1: None})),
    (
        "its last commit is noted when it closes",
        lambda: close_attempt(Fence(1, True, (A1, A2))),
        Fence(1, False, (A1, A2), {1: A2}),
    ),
    ("closing twice changes nothing", lambda: close_attempt(Fence(1, False)), Fence(1, False)),
    ("the open attempt commits", lambda: add_commit(OPEN_1, A1), Fence(1, True, (A1,))),
    ("a commit said twice stays one", lambda: add_commit(Fence(1, True, (A1,)), A1), Fence(1, True, (A1,))),
    (
        "a commit got in before the attempt closed, its answer was lost",
        lambda: add_commit(Fence(2, True, (A1,), {1: A1}), A1),
        Fence(2, True, (A1,), {1: A1}),
    ),
    (
        "commits are kept by step and attempt, in whatever order they come",
        lambda: add_commits(Fence(2, True, (A1, A2), {1: A2}), [B2]),
        Fence(2, True, (A1, B2, A2), {1: A2}),
    ),
    (
        "what a closed attempt reached stays noted when its bytes go",
        lambda: drop_commits(Fence(2, True, (A1, A2), {1: A2}), [A1, A2]),
        Fence(2, True, (), {1: A2}),
    ),
]


@pytest.mark.parametrize(("story", "change", "after"), TABLE, ids=[row[0] for row in TABLE])
def test_fence_changes(story, change, after):
    assert change() == after


REFUSED = [
    ("an older attempt opens", lambda: open_attempt(Fence(3, True), 2)),
    ("a closed attempt opens again", lambda: open_attempt(Fence(3, False), 3)),
    ("a closed attempt commits", lambda: add_commit(Fence(1, False), A1)),
    ("an older attempt commits", lambda: add_commit(Fence(2, True), A1)),
    ("an attempt commits that was never opened", lambda: add_commit(OPEN_1, B2)),
    ("nobody opened anything", lambda: add_commit(Fence(), A1)),
    ("one of several is not allowed", lambda: add_commits(OPEN_1, [A1, B2])),
]


@pytest.mark.parametrize(("story", "change"), REFUSED, ids=[row[0] for row in REFUSED])
def test_P9_fence_refuses(story, change):
    refused = change()
    assert isinstance(refused, Refused)
    assert "attempt" in refused.reason


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("close"), st.just(0), st.just(0)),
        st.tuples(st.just("commit"), st.integers(1, 5), st.integers(1, 9)),
        st.tuples(st.just("drop"), st.integers(1, 5), st.integers(1, 9)),
    ),
    max_size=40,
)


def happened(fence: Fence, kind: str, attempt: int, commit: Commit) -> Fence | Refused:
    match kind:
        case "open":
            return open_attempt(fence, attempt)
        case "close":
            return close_attempt(fence)
        case "commit":
            return add_commit(fence, commit)
        case _:
            return drop_commits(fence, [commit])


@given(EVENTS)
def test_P9_whatever_happens_only_the_open_attempt_adds(events):
    fence = Fence()
    for kind, attempt, step in events:
        before = fence
        after = happened(fence, kind, attempt, Commit(step, attempt, f"{step:04x}{attempt:04x}"))
        if isinstance(after, Refused):
            continue
        fence = after
        added = set(fence.commits) - set(before.commits)
        assert all(c.attempt == before.attempt and before.open for c in added)
        assert fence.attempt >= before.attempt
        assert list(fence.commits) == sorted(fence.commits)
        assert all(fence.closed[a] == before.closed[a] for a in before.closed)  # history is never rewritten
        assert from_json(to_json(fence)) == fence


def test_C4_the_newest_commit_is_by_step_then_attempt():
    fence = Fence(3, True, tuple(sorted([Commit(200, 1, "x"), Commit(150, 3, "y"), Commit(200, 2, "a")])))
    assert fence.newest() == Commit(200, 2, "a")


def test_a_damaged_fence_is_said_so():
    with pytest.raises(MalformedFence, match=r"fence\.json"):
        from_json(b'{"attempt": 1}')


def test_C6_of_many_that_create_one_wins(bucket: Bucket):
    url = f"{bucket.new_run()}/run.json"
    outcomes: list[str] = []

    def create(number: int) -> None:
        try:
            objects.create_exclusive(url, str(number).encode())
            outcomes.append(f"won {number}")
        except objects.ObjectExists:
            outcomes.append("lost")

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [o for o in outcomes if o.startswith("won")]
    assert len(won) == 1
    found = objects.read(url)
    assert found is not None
    assert f"won {found[0].decode()}" == won[0]


def test_C6_no_change_of_many_writers_is_lost(bucket: Bucket):
    run_dir = bucket.new_run()

    def commit_ten(writer: int) -> None:
        for i in range(10):
            update_fence(run_dir, lambda f, i=i: add_commit(f, Commit(writer * 100 + i, 1, "00000000")))

    threads = [threading.Thread(target=commit_ten, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load_fence(run_dir).commits) == 40


def test_a_stale_generation_is_refused(bucket: Bucket):
    url = f"{bucket.new_run()}/controller.json"
    first = objects.create_exclusive(url, b"1")
    objects.compare_and_set(url, b"2", first)
    with pytest.raises(objects.StaleGeneration):
        objects.compare_and_set(url, b"3", first)
    assert objects.read(url) is not None
    assert objects.read(f"{url}.none") is None


def test_P9_a_commit_of_an_attempt_that_is_over_is_refused(bucket: Bucket):
    run_dir = bucket.new_run()
    update_fence(run_dir, lambda f: add_commit(f, A1))
    update_fence(run_dir, lambda f: open_attempt(f, 2))
    with pytest.raises(FencedOut, match="attempt 2 is the newest"):
        update_fence(run_dir, lambda f: add_commit(f, A2))
    assert load_fence(run_dir) == Fence(2, True, (A1,), {1: A1})
