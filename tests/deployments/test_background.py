"""Programs in the background: found again by their process, and ended whatever they do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deployments.background import Background

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_program_is_known_while_it_lives_and_ended_however_it_clings(tmp_path: Path):
    program = Background(tmp_path / "files", "stubborn")
    assert program.pid() is None
    process = program.start([sys.executable, "-c", STUBBORN], os.environ)
    assert Background(tmp_path / "files", "stubborn").pid() == process.pid
    while "up" not in program.tail():
        assert process.poll() is None
    assert program.stop(within_s=0.2)
    assert process.wait() == -9
    assert program.pid() is None
    assert not program.stop(within_s=0.2)
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["stubborn.log"]


def test_a_later_process_of_the_same_number_is_another_one(tmp_path: Path):
    program = Background(tmp_path, "gone")
    program.start([sys.executable, "-c", ""], os.environ).wait()
    (tmp_path / "gone.json").write_text(f'{{"pid": {os.getpid()}, "started": "another boot/1"}}')
    assert program.pid() is None
