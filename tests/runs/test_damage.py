"""Files of a run that somebody damaged: one line that names the file, and every other run is shown as ever."""

from __future__ import annotations

from tests.runs.conftest import Track
from tests.runs.terminal import Terminal
from tpu.checkpoint import files

JUNK = [b"", b"{}", b"[1", b"[]", b"\xff"]


async def test_a_damaged_file_is_named_in_one_line(track: Track, terminal: Terminal):
    run = track.numpy_run("damaged", steps=4, checkpoints={"every": 4})
    await track.train(run)
    directory = track.directory("damaged")
    event = sorted(files.names(f"{directory}/events"))[0]
    for url in (f"{directory}/run.json", f"{directory}/controller.json", f"{directory}/fence.json", event):
        good = files.read(url)
        for junk in JUNK:
            files.write(url, junk)
            told = terminal.relay("show", "damaged")
            assert told.code == 1, (url, junk, told.out, told.err)
            assert told.err.count("\n") == 1, told.err
            assert url.rpartition("/")[2] in told.err
            assert "cannot be understood" in told.err
            listed = terminal.relay("runs")
            assert listed.code == 0, listed.err
            assert ("damaged: " in listed.out) == (url != event), (url, listed.out)
        files.write(url, good)
    assert terminal.relay("show", "damaged").code == 0
