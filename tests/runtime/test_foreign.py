"""A command that knows nothing of us: its metrics wherever it leaves them, its folder, its output, its end."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tpu.runtime import foreign
from tpu.runtime.wandb_record import RecordLog, WandbHistory

RECORD = gzip.decompress((Path(__file__).parent / "records/wandb-0.31.0.wandb.gz").read_bytes())


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """The folder of an attempt on a host."""
    folder = tmp_path / "runs/mine/1"
    folder.mkdir(parents=True)
    return folder


def start(attempt: Path, code: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As launch does it; the bucket does not answer, which costs nothing but a line."""
    variables = {
        "RELAY_ATTEMPT": attempt.name, "RELAY_ATTEMPT_DIR": str(attempt), "RELAY_RUN_DIR": "gs://bucket/runs/mine",
        "RELAY_EVENTS": str(attempt / "events.jsonl"), "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-I", "-S", foreign.__file__, *words],
        cwd=code, env=os.environ | variables | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def logged(attempt: Path) -> list[Mapping[str, Any]]:
    records = [json.loads(line) for line in (attempt / "events.jsonl").read_text().splitlines()]
    assert records[0]["event"] == "start"
    return [
        {k: v for k, v in one.items() if k not in ("t", "event")}
        for one in records
        if one["event"] == "logged"
    ]


PROGRAM = """
import json, os, sys
print(json.dumps({"step": 10, "loss": 0.5, "note": "words", "done": False}))
print("{no JSON", file=sys.stderr)
with open("out.jsonl", "w") as file:
    print(json.dumps({"val": {"loss": 0.25}, "_step": 11}), file=file)
print(os.environ["WANDB_MODE"], sorted(os.listdir(".")), json.dumps({"loss": 9}))
print(json.dumps({"loss": 0.125}), end="")
sys.exit(int(sys.argv[1]))
"""


def test_numbers_of_what_it_prints_and_writes_are_its_metrics_and_its_output_and_end_are_its_own(
    attempt: Path, tmp_path: Path
):
    code = tmp_path / "code"
    (code / "tpu").mkdir(parents=True)  # a package of the user's that is called as ours
    (code / "tpu/__init__.py").write_text("raise ValueError('this one is the user\\'s')")
    (code / "train.py").write_text(PROGRAM)
    ran = start(attempt, code, "--metrics-file", "out.jsonl", "--", sys.executable, "train.py", "7")
    assert ran.returncode == 7
    assert "offline ['out.jsonl', 'tpu', 'train.py'] {\"loss\": 9}" in ran.stdout
    assert "{no JSON" in ran.stdout
    assert logged(attempt)[:1] == [{"step": 10, "loss": 0.5}]
    # The one without a step is counted, wherever it comes between those of the file.
    assert sorted(logged(attempt)[1:], key=lambda one: one["step"]) in [
        [{"step": n, "loss": 0.125}, {"step": 11, "val.loss": 0.25}] for n in (2, 3)
    ]
    assert not (code / "out.jsonl").exists()


def test_attempts_of_a_run_share_a_folder_on_a_host_and_other_runs_have_their_own(
    attempt: Path, tmp_path: Path
):
    code = tmp_path / "code"
    code.mkdir()
    (code / "seed.txt").write_text("1")
    other = attempt.parents[1] / "other/1"
    other.mkdir(parents=True)
    command = ("--", "sh", "-c", "ls; touch own-checkpoint")
    assert start(attempt, code, *command).stdout.split() == ["seed.txt"]
    second = attempt.with_name("2")
    second.mkdir()
    assert start(second, code, *command).stdout.split() == ["own-checkpoint", "seed.txt"]
    assert start(other, code, *command).stdout.split() == ["seed.txt"]


@pytest.mark.parametrize(
    ("command", "code"),
    [("kill -SEGV $$", -signal.SIGSEGV), ("kill -TERM $PPID; exit 3", 3)],
    ids=["a signal", "told to leave"],
)
def test_its_end_is_seen_from_outside(attempt: Path, tmp_path: Path, command: str, code: int):
    (tmp_path / "code").mkdir()
    assert start(attempt, tmp_path / "code", "--", "sh", "-c", command).returncode == code


@pytest.mark.parametrize(("word", "code"), [("./nowhere", 127), ("./data.txt", 126)])
def test_what_cannot_be_started_says_so(attempt: Path, tmp_path: Path, word: str, code: int):
    tree = tmp_path / "code"
    tree.mkdir()
    (tree / "data.txt").write_text("")
    ran = start(attempt, tree, "--", word)
    assert ran.returncode == code
    assert f"cannot start {word!r}" in ran.stderr


def test_the_record_of_weights_and_biases_is_read_as_it_grows(tmp_path: Path):
    """Written by wandb 0.31 in offline mode; one of its rows is longer than a block of the file."""
    old = tmp_path / "wandb/offline-run-0-old/run-old.wandb"
    old.parent.mkdir(parents=True)
    old.write_bytes(RECORD)
    history = WandbHistory(tmp_path)
    file = tmp_path / "wandb/offline-run-1-new/run-new.wandb"
    file.parent.mkdir()
    rows: list[Mapping[str, Any]] = []
    for end in range(0, len(RECORD), 997):
        file.write_bytes(RECORD[:end])
        rows += history.new()
    file.write_bytes(RECORD)
    rows += history.new()
    assert [(row["_step"], foreign.numbers_of(row)) for row in rows[:5]] == [
        (i, {"loss": 1 / (i + 1), "val.acc": i}) for i in range(5)
    ]
    assert rows[5]["_step"] == 5
    assert rows[5]["best"] is True
    assert len(rows) == 6


@pytest.mark.parametrize("content", [b"", b":W&B", b"no such file", RECORD[:7] + b"\xff" * 100, bytes(9)])
def test_a_file_that_is_no_such_record_has_no_rows(tmp_path: Path, content: bytes):
    (tmp_path / "run-x.wandb").write_bytes(content)
    assert list(RecordLog(tmp_path / "run-x.wandb").new()) == []


def test_a_file_that_is_written_anew_is_read_from_its_begin(tmp_path: Path):
    file = foreign.JsonLines(tmp_path / "m.jsonl")
    assert list(file.new()) == []
    (tmp_path / "m.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(file.new()) == [{"a": 1}, {"a": 2}]
    with (tmp_path / "m.jsonl").open("a") as more:
        more.write(': 3}\n[1]\n"words"\n')
    assert list(file.new()) == [{"a": 3}]
    (tmp_path / "m.jsonl").write_text('{"a": 9}\n')
    assert list(file.new()) == [{"a": 9}]
