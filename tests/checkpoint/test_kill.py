"""SIGKILL at any moment of a save, of a real process, many times."""

from __future__ import annotations

import dataclasses
import random
import time

from tests.checkpoint.bucket import Training, committed_steps, opened, wait_until
from tests.trainers.undisturbed import undisturbed
from tpu.checkpoint.fence import load_fence
from tpu.checkpoint.restore import restore
from tpu.checkpoint.verify import verify_run

KILLS = 8


def test_C1_killed_at_any_moment_the_last_commit_stands(training: Training):
    """Saves at every step, so that nearly every moment is one of a save."""
    endless = dataclasses.replace(training, last_step=100_000, stop_steps=tuple(range(1, 5000)))
    rng = random.Random(1)
    reached = 0
    for attempt in range(1, KILLS + 1):
        opened(training.run_dir, attempt)
        trainer = endless.start(attempt)
        begun = "restored" if attempt > 1 else "commit"  # one commit at least, however slow the machine is
        wait_until(lambda t=trainer, begun=begun: bool(t.events(begun)), "the trainer to begin")
        time.sleep(rng.uniform(0.0, 1.5))  # the random moment is the point
        trainer.kill()
        said = [c["step"] for c in trainer.events("commit")]
        steps = committed_steps(training.run_dir)
        assert set(said) <= set(steps), "what was said to be committed is"
        assert max(steps, default=0) >= reached
        reached = max(steps, default=0)
    assert reached > 0
    assert all(verdict.whole for verdict in verify_run(training.run_dir))
    restored = restore(training.run_dir, load_fence(training.run_dir))
    assert restored is not None
    assert restored.step == reached
    assert_undisturbed(restored.arrays, reached)


def assert_undisturbed(arrays: object, steps: int, seed: int = 7) -> None:
    """The arrays are what training without any interruption gives."""
    for name, whole in undisturbed(seed, steps)[0].items():
        assert arrays[name].tobytes() == whole.tobytes(), name  # type: ignore[index]
