"""The README shows the files that are there, and its PyTorch loop survives."""

from __future__ import annotations

from pathlib import Path

from tests.xla.conftest import Maker
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import load_fence
from tpu.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "deployments/examples/torch_loop.py"


def test_the_readme_shows_the_loop_as_it_is():
    assert LOOP.read_text().strip() in (ROOT / "README.md").read_text()


def test_the_loop_has_the_same_bits_after_a_kill(by_hand: Maker):
    loop = {
        "program": "deployments.examples.torch_loop",
        "config": {},
        "last_step": 60,
        "stops": [20, 40, 60],
    }
    whole = by_hand("loop-whole", **loop)
    assert whole.start().exit_codes() == [0], whole.started[-1].output()
    cut = by_hand("loop-cut", **loop)
    first = cut.start()
    first.wait_for(lambda event: event["event"] == "commit")
    first.kill()
    if load_fence(cut.run_dir).newest().step < 60:
        assert cut.start().exit_codes() == [0], cut.started[-1].output()
    assert run_digest(cut.run_dir, 60, prefix="") == run_digest(whole.run_dir, 60, prefix="")

    def losses(run):
        return [row["loss"] for row in read_metrics(run.run_dir, load_fence(run.run_dir))]

    assert losses(cut) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]
