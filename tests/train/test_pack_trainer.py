"""The trainer of packs through the segment contracts of its members."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.train.attempts import Attempt, ByHand
from tests.train.test_trainer import TINY_ICL
from tpu.checkpoint.digest import run_digest
from tpu.checkpoint.fence import close_attempt, load_fence, open_attempt, update_fence
from tpu.checkpoint.restore import restore
from tpu.runtime.metrics import read_metrics
from tpu.train.packs import Member
from tpu.train.settings import Training

STEPS, EVERY = 3000, 500


class PackByHand:
    """A pack in the bucket: its members' attempts are opened with its own, as its driver does it."""

    def __init__(self, name: str, folder: Any, members: dict[str, dict[str, Any]]) -> None:
        self.name = name
        self.steps = STEPS
        self.allow_mixed = False
        self.over: set[str] = set()
        self._members = members
        self._run = ByHand(
            os.environ["STORAGE_EMULATOR_HOST"], name, folder, {}, 1, [1], devices=2,
            program="tpu.train.pack_trainer",
        )  # fmt: skip

    def directory(self, member: str) -> str:
        return f"{self._run.run_dir}-{member}"

    def start(self) -> Attempt:
        self._run.config = {"members": [self._member(*one).to_values() for one in self._members.items()]}
        return self._run.start()

    def _member(self, name: str, changes: dict[str, Any]) -> Member:
        run_dir = self.directory(name)
        made = Member(
            name,
            run_dir,
            None,
            tuple(range(EVERY, STEPS, EVERY)),
            changes.get("steps", self.steps),
            training(changes),
            allow_mixed=self.allow_mixed,
        )
        if name in self.over:
            return made
        fence = update_fence(run_dir, lambda fence: open_attempt(fence, fence.attempt + 1))
        return replace(made, attempt=fence.attempt)

    def outcome(self, member: str) -> Any:
        """Parameters' hash and all logged numbers."""
        run_dir = self.directory(member)
        rows = read_metrics(run_dir, load_fence(run_dir))
        return run_digest(run_dir), [(row["step"], row["loss"], row["gradient_norm"]) for row in rows]

    def kill(self) -> None:
        for attempt in self._run.started:
            attempt.kill()


def training(changes: dict[str, Any]) -> Training:
    values = TINY_ICL | {"log_every": 100, "steps_per_call": 50, "seed": changes.get("seed", 0)}
    rate = {"learning_rate": changes.get("rate", 1e-2), "schedule": "constant"}
    return Training.model_validate(values | {"optimizer": rate})


@pytest.fixture
def packs(bucket, tmp_path):
    made = []

    def make(name, members):
        made.append(PackByHand(name, tmp_path / name, members))
        return made[-1]

    yield make
    for pack in made:
        pack.kill()


@pytest.mark.slow  # three starts of JAX; that lanes keep their bits is held by test_pack.py, kills by the trainer alone
def test_members_keep_their_bits_through_a_kill_a_notice_and_the_ends_of_their_neighbours(packs):
    members = {"a": {}, "b": {"seed": 1}, "c": {"rate": 1e-3, "steps": 1700}}
    straight = packs("straight", members | {"d": {"seed": 2}})
    attempt = straight.start()
    assert attempt.exit_codes(180) == [0], attempt.output()
    assert {e["member"]: e["end"] for e in attempt.events() if e["event"] == "ended"} == dict.fromkeys(
        "abcd", "finished"
    )
    assert load_fence(straight.directory("c")).newest().step == 1700

    # In the place of d a run that diverges; b is stopped on the way, as a pruned one is, and goes on later.
    broken = packs("broken", members | {"d": {"seed": 2, "rate": 1e30}})
    killed = broken.start()
    killed.wait_for(lambda e: e["event"] == "commit" and e["step"] >= 500 and "member" not in e)
    killed.kill()
    ends = {e["member"]: e for e in killed.events() if e["event"] == "ended"}
    assert {name: end["end"] for name, end in ends.items()} == {"d": "diverged"}
    assert "the training diverged" in ends["d"]["reason"]
    broken.over = {"d"}

    noticed = broken.start()
    noticed.wait_for(lambda e: e["event"] == "step" and e["step"] >= 700 and "member" not in e)
    update_fence(broken.directory("b"), close_attempt)
    noticed.wait_for(lambda e: e.get("end") == "fenced out" and e["member"] == "b")
    noticed.notice()
    assert noticed.exit_codes(180) == [75], noticed.output()

    last = broken.start()
    assert last.exit_codes(180) == [0], last.output()
    resumed = {e["member"]: e["step"] for e in last.events() if e["event"] == "restored"}
    assert set(resumed) == set("abc")
    assert resumed["b"] < resumed["a"]
    for name in "abc":
        assert broken.outcome(name) == straight.outcome(name), name


@pytest.mark.slow  # six starts of JAX
def test_a_run_goes_on_in_a_pack_and_alone_again_if_that_is_allowed(packs, bucket, tmp_path):
    config = training({}).model_dump(mode="json")
    pack = packs("changing", {"a": {}, "b": {"seed": 1}})
    alone = ByHand(os.environ["STORAGE_EMULATOR_HOST"], "changing-a", tmp_path / "alone", config, 500, [500])
    straight = ByHand(
        os.environ["STORAGE_EMULATOR_HOST"], "unchanging", tmp_path / "straight", config, 1500, [1500]
    )
    try:
        assert straight.start().exit_codes(180) == [0]
        assert alone.start().exit_codes(180) == [0]

        pack.steps = 1000
        refused = pack.start()
        assert refused.exit_codes(180) == [0]
        (end,) = (e for e in refused.events() if e["event"] == "ended" and e["member"] == "a")
        assert end["end"] == "failed"
        assert "(not set) → lane 0 of 2, up to 4 tasks" in end["reason"]
        pack.allow_mixed = True
        assert pack.start().exit_codes(180) == [0]

        assert load_fence(alone.run_dir).newest().step == 1000

        alone.last_step = 1500
        assert alone.start().exit_codes(180) == [1]
        assert "lane 0 of 2, up to 4 tasks → (not set)" in alone.started[-1].output()
        assert alone.start(RELAY_ALLOW_MIXED="1").exit_codes(180) == [0], alone.started[-1].output()
    finally:
        for run in (alone, straight):
            for attempt in run.started:
                attempt.kill()
    found, expected = ({row["step"]: row["loss"] for row in read_metrics(run.run_dir, load_fence(run.run_dir))}
                       for run in (alone, straight))  # fmt: skip
    assert found.keys() == expected.keys()
    early = [step for step in found if step <= 600]  # later on rounding has grown
    assert [found[step] for step in early] == pytest.approx([expected[step] for step in early], rel=1e-2)
    restored = restore(alone.run_dir, load_fence(alone.run_dir))
    assert restored is not None
    assert restored.manifest.mixed
