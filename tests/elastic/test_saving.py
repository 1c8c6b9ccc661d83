"""Who saves an elastic run: an attempt of its own, every loss whoever took over, and nothing of who is out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.checkpoint.bucket import Bucket, committed_steps, wait_until
from tests.checkpoint.conftest import bucket, bucket_server  # noqa: F401
from tpu.checkpoint.fence import load_fence
from tpu.elastic.place import Finder, Place, look, settle
from tpu.elastic.saving import Saving
from tpu.runtime.metrics import read_metrics
from tpu.runtime.plan import Plan


def saving_of(run_dir: str, told: list[str], confirmed: Callable[[], bool] = lambda: True) -> Saving:
    plan = Plan(run_dir=run_dir, attempt=1, stop_steps=(10, 20), last_step=20)
    return Saving(
        plan, dict, {"machine": "of this test"}, False, lambda event, **_: told.append(event), 1, confirmed
    )


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.full(5, step, np.float32), "count": np.array(step)}


def saved(saving: Saving, step: int) -> None:
    done = threading.Event()
    saving.save(step, state_at(step), done.set)
    assert done.wait(30)


def test_P9_what_is_saved_by_one_whose_turn_is_over_is_refused_and_the_next_has_all_losses(
    bucket: Bucket,  # noqa: F811
):
    run_dir, told, later = bucket.new_run(), [], []
    first, second = saving_of(run_dir, told, lambda: "leads" not in told), saving_of(run_dir, later)
    first.lead(True)
    for step in range(1, 16):
        first.log(step, step / 2)
    saved(first, 10)
    first.forget(10)
    second.take(first.hand_on())  # it arrives, and gets what is not committed
    second.lead(True)
    wait_until(lambda: "leads" in later, "the turn of the second")
    first.save(20, state_at(20), lambda: told.append("committed"))
    wait_until(lambda: "save_refused" in told, "the refusal")
    for step in range(16, 21):
        second.log(step, step / 2)
    saved(second, 20)
    first.close()
    second.close()
    assert "committed" not in told
    fence = load_fence(run_dir)
    assert [(commit.step, commit.attempt) for commit in fence.commits] == [(10, 2), (20, 3)]
    rows = [(row["step"], row["loss"]) for row in read_metrics(run_dir, fence)]
    assert rows == [(step, step / 2) for step in range(1, 21)]


def test_nothing_is_opened_by_one_that_has_nothing_to_save(bucket: Bucket):  # noqa: F811
    run_dir, told = bucket.new_run(), []
    before = load_fence(run_dir)
    saving = saving_of(run_dir, told)
    saving.forget(20)  # the last step is committed
    saving.lead(True)
    saving.close()
    assert told == []
    assert load_fence(run_dir) == before
    assert committed_steps(run_dir) == []


class _Server:
    """A coordinator that is nowhere."""

    port = 7

    def __init__(self) -> None:
        self.ended = False

    def watch(self, place: Place) -> None: ...

    def end(self) -> None:
        self.ended = True


def test_the_first_that_finds_no_coordinator_becomes_it_and_one_that_does_not_answer_is_replaced(
    bucket: Bucket,  # noqa: F811
):
    run_dir, now = bucket.new_run(), 0.0
    first, second = (
        Finder(run_dir, host, lambda key: _Server(), lambda: now) for host in ("10.0.0.1", "10.0.0.2")
    )
    assert first() == ("10.0.0.1", 7)
    key = first.place().key
    assert [second() for _ in range(3)] == [("10.0.0.1", 7)] * 3
    now += 60.0  # it answered meanwhile, and is asked for again much later
    assert [second() for _ in range(4)] == [("10.0.0.1", 7)] * 3 + [("10.0.0.2", 7)]
    assert first() == ("10.0.0.2", 7)
    assert second.place().key == key
    assert second.is_current()


def test_of_two_that_replace_a_coordinator_one_wins(bucket: Bucket):  # noqa: F811
    run_dir = bucket.new_run()
    assert settle(run_dir, ("10.0.0.1", 7), "a key", None) is not None
    seen = look(run_dir)
    assert settle(run_dir, ("10.0.0.2", 7), "a key", seen) is not None
    assert settle(run_dir, ("10.0.0.3", 7), "a key", seen) is None
    assert "a key" not in repr(look(run_dir))
