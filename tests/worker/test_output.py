"""The output of a flow run comes whole and once, whoever copies it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu.worker.output import CHUNK_BYTES, Output


def test_the_next_worker_goes_on_where_the_last_one_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "output.log"
    first = Output(path)
    first.copy()  # nothing is there yet
    path.write_text("one\n")
    first.copy()
    first.copy()
    with path.open("a") as file:
        file.write("while nobody watched\n")
    Output(path).copy()
    Output(path).copy()
    assert capsys.readouterr().out == "one\nwhile nobody watched\n"


def test_a_flood_is_copied_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "output.log"
    path.write_text("x" * (2 * CHUNK_BYTES) + "the end")
    Output(path).copy()
    assert len(out := capsys.readouterr().out) == 2 * CHUNK_BYTES + 7
    assert out.endswith("the end")
