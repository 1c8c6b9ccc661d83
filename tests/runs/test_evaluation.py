"""An evaluation command of the user's: whatever it does, the flow goes on, and nothing of it lives on."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.runs.conftest import Track, until
from tpu.checkpoint import files
from tpu.checkpoint.digest import NoSuchCheckpoint
from tpu.checkpoint.fence import Commit, Fence, update_fence
from tpu.runs import evaluation
from tpu.runs.code import pack
from tpu.runs.evaluation import (
    EvaluationFailed,
    InvalidCheckpointName,
    NoEvaluator,
    asked_checkpoints,
    evaluate_checkpoint,
    load_evaluation,
)
from tpu.runs.evaluation_table import to_markdown
from tpu.runs.record import RunNotFound, code_url


async def evaluate(track: Track, name: str, script: str) -> dict[str, float]:
    record = track.record(name, evaluate_command=["/bin/sh", "-c", script])
    async with asyncio.timeout(20):
        return await evaluate_checkpoint(record, track.directory(name), 40, print)


def lives(pid_file: Path) -> bool:
    try:
        stat = Path(f"/proc/{pid_file.read_text().strip()}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def test_what_an_evaluation_leaves_running_neither_holds_it_up_nor_lives_on(
    track: Track, tmp_path: Path
):
    pid = tmp_path / "pid"
    assert await evaluate(track, "leaves", f"sleep 600 & echo $! > {pid}; echo '{{\"loss\": 1}}'") == {
        "loss": 1
    }
    assert load_evaluation(track.directory("leaves"), 40) == {"loss": 1}
    await until(lambda: not lives(pid), "the end of what it left")


async def test_an_evaluation_that_never_ends_is_ended_and_said_so(
    track: Track, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluation, "EVALUATION_S", 1.0)
    pid = tmp_path / "pid"
    with pytest.raises(EvaluationFailed, match=r"step 40 did not end in 1 s:\nstill at it"):
        await evaluate(track, "hangs", f"echo $$ > {pid}; echo still at it >&2; sleep 600; echo late")
    await until(lambda: not lives(pid), "its end")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "exited 0 and printed no JSON object last"),
        ("echo '[1]'", "exited 0 and printed no JSON object last"),
        ("echo because >&2; exit 3", "exited 3:\nbecause"),
        ("kill -9 $$", "exited -9"),
    ],
)
async def test_an_evaluation_without_an_answer_is_one_clear_error(track: Track, script: str, words: str):
    with pytest.raises(EvaluationFailed, match=words):
        await evaluate(track, "silent", script)
    assert load_evaluation(track.directory("silent"), 40) is None


async def test_of_an_endless_output_the_last_line_counts(track: Track):
    script = "yes | head -c 100000000; echo '{\"loss\": 2}'"
    assert await evaluate(track, "talks", script) == {"loss": 2}


async def test_what_was_evaluated_is_not_evaluated_again_unless_asked(track: Track):
    record = track.record("twice", evaluate_command=["/bin/sh", "-c", 'echo "{\\"n\\": $N}"'])
    run_dir, said = track.directory("twice"), list[str]()
    answers = []
    for number, again in ((1, False), (2, False), (3, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("N", str(number))
            answers.append(await evaluate_checkpoint(record, run_dir, 40, said.append, again))
    assert answers == [{"n": 1}, {"n": 1}, {"n": 3}]
    assert load_evaluation(run_dir, 40) == {"n": 3}


async def test_an_evaluation_starts_in_the_code_of_its_run(track: Track, tmp_path: Path):
    record = track.record("own-code", evaluate_command=["/bin/sh", "answer.sh"])
    script = b"echo '{\"answer\": 42}'\n"
    files.write(
        code_url(track.directory("own-code"), record.code), pack([("answer.sh", script, False)], "x").data
    )
    said: list[str] = []
    assert await evaluate_checkpoint(record, track.directory("own-code"), 40, said.append) == {"answer": 42}
    assert said == []


async def test_an_evaluation_whose_flow_is_killed_leaves_no_process_and_no_folder(tmp_path: Path):
    folder, pid = tmp_path / "folder", tmp_path / "pid"
    folder.mkdir()
    command = ["/bin/sh", "-c", f"echo $$ > {pid}; exec sleep 600"]
    flow = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        "import asyncio, os, sys; from tpu.runs.evaluation import _run;"
        "asyncio.run(_run(sys.argv[2:], os.environ, sys.argv[1]))", folder, *command,
    )  # fmt: skip
    await until(lambda: lives(pid), "the evaluator")
    flow.kill()
    await flow.wait()
    await until(lambda: not lives(pid) and not folder.exists(), "the end of what it left")


def committed(track: Track, name: str, *steps: int) -> None:
    commits = tuple(Commit(step, 1, "AAAAAA==") for step in steps)
    update_fence(track.directory(name), lambda _: Fence(1, commits=commits))


def test_which_checkpoints_are_meant(track: Track):
    track.record("icl-3", evaluate_command=["true"])
    committed(track, "icl-3", 20, 40, 60)
    for text, every, steps in (
        ("icl-3", False, (60,)), ("icl-3", True, (20, 40, 60)), (" icl-3@40 ", False, (40,)),
    ):  # fmt: skip
        assert asked_checkpoints(track.bucket, text, every).steps == steps


def test_what_cannot_be_evaluated_is_one_clear_error(track: Track):
    track.record("icl-3", evaluate_command=["true"])
    committed(track, "icl-3", 20)
    track.record("young", evaluate_command=["true"])
    track.record("dumb")
    track.record("foreign", contract=False)
    for text, every, kind, words in (
        ("icl-4", False, RunNotFound, "there is no run icl-4 in "),
        ("icl-3@30", False, NoSuchCheckpoint, "has no checkpoint at step 30; it has: 20"),
        ("young", False, NoSuchCheckpoint, "young has no checkpoint yet"),
        ("dumb", True, NoEvaluator, "relay fork dumb@STEP NEW --set evaluate_command="),
        ("foreign", False, NoEvaluator, "saves by its own means"),
        ("gs://b/runs/x", False, InvalidCheckpointName, "write a run, such as icl"),
        ("icl-3@x", False, InvalidCheckpointName, "or one of its checkpoints, such as icl@500"),
        ("icl-3@20", True, InvalidCheckpointName, "write icl-3 for all of them"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            asked_checkpoints(track.bucket, text, every)


def test_the_table_has_a_column_a_step_and_says_what_failed():
    text = to_markdown(
        "icl", {20: {"loss": 0.5, "step": 20}, 40: {"loss": 0.25, "step": 40}}, {60: "it\nbroke"}
    )
    assert "| | step 20 | step 40 |\n| --- | ---: | ---: |\n| loss | 0.5 | 0.25 |" in text
    assert "**Step 60 could not be evaluated:**\n\n    it\n    broke" in text
