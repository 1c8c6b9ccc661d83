"""The segment contract with a real training process: same bits, notices, kills, failures."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from tests.checkpoint.bucket import Trainer, Training, closed, committed_steps, opened, wait_until
from tests.checkpoint.faults import FaultyGcs
from tpu.checkpoint import files
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import Commit, Fence, load_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.runtime.metrics import merged, read_metrics
from tpu.runtime.plan import ContractError, Plan, call_length
from tpu.runtime.segment import EXIT_FENCED_OUT, EXIT_NOTICED

SLOWLY = {"NUMPY_STEP_SECONDS": "0.03"}


def result_of(run_dir: str) -> tuple[str, list[tuple[object, object]]]:
    """Digest of all state at the end, and every logged loss."""
    losses = [(r["step"], r["loss"]) for r in read_metrics(run_dir, closed(run_dir))]
    return run_digest(run_dir, 20, prefix=""), losses


@pytest.fixture
def undisturbed(training: Training) -> tuple[str, list[tuple[object, object]]]:
    calm = dataclasses.replace(training, run_dir=training.bucket.new_run(), stop_steps=(20,))
    assert calm.start(1).finish() == 0
    digest, losses = result_of(calm.run_dir)
    assert [step for step, _ in losses] == list(range(1, 21))
    return digest, losses


def test_same_bits_whatever_interrupts(training: Training, undisturbed):
    """Kills and notices at random steps, log-spaced stop steps, several steps a call."""
    rng = random.Random(3)
    run = dataclasses.replace(training, stop_steps=(1, 2, 4, 8, 16, 20), environment=SLOWLY)
    for attempt, interrupt in ((1, Trainer.kill), (2, Trainer.notice), (3, Trainer.kill)):
        opened(run.run_dir, attempt)
        trainer = run.start(attempt)
        trainer.await_step(max(committed_steps(run.run_dir), default=0) + rng.randint(2, 5))
        interrupt(trainer)
        if interrupt is Trainer.notice:
            assert trainer.finish() == EXIT_NOTICED
    opened(run.run_dir, 4)
    assert run.start(4).finish() == 0
    assert result_of(run.run_dir) == undisturbed


def test_P8_a_notice_costs_no_step(training: Training, undisturbed):
    run = dataclasses.replace(training, stop_steps=(20,), environment=SLOWLY)
    first = run.start(1)
    first.await_step(7)
    first.notice()
    assert first.finish() == EXIT_NOTICED
    (noticed,) = first.events("notice")
    last_logged = max(e["step"] for e in first.events("step"))  # type: ignore[type-var]
    assert committed_steps(run.run_dir) == [noticed["step"]] == [last_logged]
    opened(run.run_dir, 2)
    second = run.start(2)
    assert second.finish() == 0
    assert second.events("restored")[0]["step"] == noticed["step"]
    assert result_of(run.run_dir) == undisturbed


def test_P8_a_notice_before_the_first_step_ends_at_once(training: Training):
    trainer = dataclasses.replace(training, environment={"NUMPY_NOTICE_SELF": "1"}).start(1)
    assert trainer.finish() == EXIT_NOTICED
    assert committed_steps(training.run_dir) == []


def test_P9_a_zombie_is_fenced_out(training: Training, undisturbed):
    """The first attempt trains on while the second one has been opened and finishes."""
    run = dataclasses.replace(training, environment=SLOWLY)
    zombie = run.start(1)
    zombie.await_step(6)
    opened(run.run_dir, 2)
    second = run.start(2)
    assert zombie.finish() == EXIT_FENCED_OUT
    assert "attempt 2" in zombie.output
    assert second.finish() == 0
    assert {c.attempt for c in load_fence(run.run_dir).commits if c.step > 5} == {2}
    assert result_of(run.run_dir) == undisturbed


def test_P9_an_attempt_that_is_over_does_not_even_begin(training: Training):
    opened(training.run_dir, 2)
    trainer = training.start(1)
    assert trainer.finish() == EXIT_FENCED_OUT
    assert not trainer.events("step")


def stopped_after_step_10(run: Training) -> None:
    """Attempt 1 commits steps 5 and 10 and dies at step 12."""
    trainer = run.start(1, NUMPY_FAIL="hang@12")
    wait_until(lambda: committed_steps(run.run_dir) == [5, 10], "two commits")
    trainer.kill()


def test_C2_a_damaged_checkpoint_is_skipped_and_said_so(training: Training, undisturbed):
    run = training
    stopped_after_step_10(run)
    path = training.bucket.file(f"{checkpoint_url(run.run_dir, 10, 1)}/shards-0-0.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    opened(run.run_dir, 2)
    second = run.start(2)
    assert second.finish() == 0
    (skipped,) = second.events("skipped")
    assert (skipped["step"], skipped["attempt"]) == (10, 1)
    assert "shards-0-0.safetensors" in str(skipped["reason"])
    assert second.events("restored")[0]["step"] == 5
    assert result_of(run.run_dir) == undisturbed


def test_C3_only_incomplete_checkpoints_begins_at_step_0(training: Training, undisturbed):
    files.write(f"{checkpoint_url(training.run_dir, 5, 1)}/shards-0-0.safetensors", b"partial")
    files.write(f"{checkpoint_url(training.run_dir, 5, 1)}/manifest.json", b"{}")
    opened(training.run_dir, 2)
    trainer = training.start(2)
    assert trainer.finish() == 0
    (restored,) = trainer.events("restored")
    assert (restored["step"], restored["attempt"]) == (0, None)
    assert "step 0" in str(restored["reason"])
    assert result_of(training.run_dir) == undisturbed


@pytest.mark.parametrize("kind", ["nan", "nanstate"])
def test_C10_nan_stops_and_keeps_the_last_good_checkpoint(training: Training, kind: str):
    """NaN in the loss, and NaN that reached the state without showing in a logged loss."""
    trainer = dataclasses.replace(
        training, environment={"NUMPY_FAIL": f"{kind}@7", "NUMPY_LOG_EVERY": "1" if kind == "nan" else "20"}
    ).start(1)
    assert trainer.finish() == 1
    assert committed_steps(training.run_dir) == [5]
    assert "DivergedError" in trainer.output
    assert ("step 8" if kind == "nan" else "step 10") in trainer.output


def test_O8_the_users_exception_is_the_last_word_and_nothing_is_lost(training: Training):
    trainer = dataclasses.replace(training, environment={"NUMPY_FAIL": "exception@7"}).start(1)
    assert trainer.finish() == 1
    assert "RuntimeError: the user's code failed on demand at step 7" in trainer.output
    assert committed_steps(training.run_dir) == [5]
    assert [r["step"] for r in read_metrics(training.run_dir, load_fence(training.run_dir))] == [*range(1, 8)]


def test_C7_the_last_save_fails_clearly(training: Training):
    """The right to write is lost: training goes on, but does not end as if all were well."""
    with FaultyGcs(training.bucket.url) as faulty:
        run = dataclasses.replace(training, environment={"STORAGE_EMULATOR_HOST": faulty.url, **SLOWLY})
        trainer = run.start(1)
        wait_until(lambda: committed_steps(run.run_dir) == [5], "the first commit")
        faulty.fail_always(403)
        assert trainer.finish() == 1
    assert "SaveFailed" in trainer.output
    assert "refused on demand" in trainer.output
    assert trainer.events("save_failed")
    assert not trainer.events("done")
    assert [e["step"] for e in trainer.events("step")][-1] == 20, "training went on to its end"
    assert committed_steps(run.run_dir)[0] == 5


def test_C9_another_environment_is_refused_or_marked_mixed(training: Training):
    run = training
    stopped_after_step_10(run)
    opened(run.run_dir, 2)
    refused = run.start(2, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    assert refused.finish() == 1
    assert "XLA_FLAGS: (not set) → --xla_cpu_enable_fast_math=true" in refused.output
    opened(run.run_dir, 3)
    allowed = run.start(3, XLA_FLAGS="--xla_cpu_enable_fast_math=true", RELAY_ALLOW_MIXED="1")
    assert allowed.finish() == 0
    manifest = json.loads(files.read(f"{checkpoint_url(run.run_dir, 20, 3)}/manifest.json"))
    assert manifest["mixed"] is True


def test_two_processes_same_bits_and_one_step_at_a_notice(training: Training):
    """Each process holds half of the rows. After a notice both save the same step, though they run apart."""
    results = []
    for disturbed in (False, True):
        run = dataclasses.replace(training, run_dir=training.bucket.new_run(), environment=SLOWLY)
        attempt = 1
        if disturbed:
            pair = [run.start(1, process=i, processes=2) for i in range(2)]
            pair[0].await_step(7)
            for trainer in pair:
                trainer.notice()
            assert [t.finish() for t in pair] == [EXIT_NOTICED, EXIT_NOTICED]
            assert pair[0].events("notice")[0]["step"] == pair[1].events("notice")[0]["step"]
            assert committed_steps(run.run_dir)[-1] == pair[0].events("notice")[0]["step"]
            opened(run.run_dir, 2)
            attempt = 2
        pair = [run.start(attempt, process=i, processes=2) for i in range(2)]
        assert [t.finish() for t in pair] == [0, 0]
        results.append(result_of(run.run_dir))
    assert results[0] == results[1]


CALLS = [
    ("a whole call", 0, 10, (100,), 10),
    ("a stop step is nearer", 90, 10, (95, 100), 1),
    ("back to the grid after an odd step", 95, 10, (100, 200), 1),
    ("up to the stop step exactly", 90, 10, (100,), 10),
    ("one step a call", 3, 1, (4,), 1),
]


@pytest.mark.parametrize(("story", "step", "size", "stops", "count"), CALLS, ids=[c[0] for c in CALLS])
def test_call_length(story, step, size, stops, count):
    assert call_length(step, size, stops) == count


def test_borders_are_the_same_wherever_a_run_was_interrupted():
    def borders(start: int, stops: tuple[int, ...]) -> set[int]:
        found, step = set(), start
        while step < 100:
            step += call_length(step, 10, stops)
            found.add(step)
        return found

    whole = borders(0, (100,))
    assert whole <= borders(0, (7, 33, 100)) | {0}
    assert {s for s in whole if s > 43} <= borders(43, (50, 100))


MERGED = [
    (
        "what a closed attempt did after its last commit was done again",
        {1: 5},
        None,
        [(1, 5), (1, 6)],
        [(5, 1)],
    ),
    ("the open attempt counts in full", {}, 1, [(1, 5), (1, 6)], [(5, 1), (6, 1)]),
    ("the later attempt wins", {1: 9}, 2, [(1, 5), (2, 5)], [(5, 2)]),
    ("a closed attempt without a commit counts for nothing", {1: None}, 2, [(1, 5), (2, 6)], [(6, 2)]),
    ("an attempt nobody opened counts for nothing", {1: 9}, 2, [(3, 5), (1, 4)], [(4, 1)]),
]


@pytest.mark.parametrize(
    ("story", "closed_at", "open_", "records", "left"), MERGED, ids=[m[0] for m in MERGED]
)
def test_metrics_have_one_record_a_step(story, closed_at, open_, records, left):
    fence = Fence(
        attempt=open_ or max(closed_at),
        open=open_ is not None,
        closed={a: Commit(s, a, "x") if s is not None else None for a, s in closed_at.items()},
    )
    found = merged([(a, {"step": s, "loss": 1.0}) for a, s in records], fence)
    assert [(r["step"], r["attempt"]) for r in found] == left


def test_a_program_started_by_hand_is_told_what_is_missing():
    with pytest.raises(ContractError, match="RELAY_ATTEMPT is not set"):
        Plan.from_environment({})
    with pytest.raises(ContractError, match="gs://bucket"):
        Plan.from_environment({"RELAY_ATTEMPT": "1", "RELAY_LAST_STEP": "5", "RELAY_RUN_DIR": "/tmp/x"})
    with pytest.raises(ContractError, match="whole number"):
        Plan.from_environment({"RELAY_ATTEMPT": "one"})
