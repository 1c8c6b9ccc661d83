"""An evaluation command of the user's: whatever it does, the flow goes on, and nothing of it lives on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.runs.conftest import Track, until
from tpu.runs import evaluation
from tpu.runs.evaluation import EvaluationFailed, evaluate_checkpoint, load_evaluation


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
