"""The `relay` command on a run that is there; what needs a live gang is in test_stopping.py and test_remote.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.runs.conftest import Track
from tests.runs.histories import V4_8
from tests.runs.terminal import Terminal, relay_process
from tpu.checkpoint import files
from tpu.checkpoint.digest import parameters_digest
from tpu.checkpoint.fence import open_attempt, update_fence
from tpu.checkpoint.paths import checkpoint_url
from tpu.clock import SystemClock
from tpu.emulator.emulator import Emulator
from tpu.runs.controller import claim, this_process
from tpu.runs.event_log import EventLog
from tpu.runs.logs import NoLog, read_log
from tpu.runs.record import load_record
from tpu.runs.waiting_board import load_waiting, shown_waiting
from tpu.slices.candidate import Candidate
from tpu.slices.zone_health import PlaceHealth, ZoneHealth, closed, noted, to_json


@pytest.fixture(scope="module")
def shown(emulator_session: Emulator, program_folder: Path) -> Iterator[Track]:
    """A bucket with the run `done`, trained to its end; for tests that only read it, or fork it."""
    emulator_session.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator_session.env.items():
            patch.setenv(name, value)
        track = Track(emulator_session, program_folder)
        asyncio.run(track.train(track.numpy_run("done", steps=40)))
        yield track
    emulator_session.reset()


@pytest.fixture(autouse=True)
def _environment(shown: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shown.emulator.env.items():
        monkeypatch.setenv(name, value)


COMMANDS = [
    "runs",
    "show",
    "status",
    "zones",
    "logs",
    "ssh",
    "stop",
    "extend",
    "fork",
    "export",
    "evaluate",
    "verify",
    "profile",
    "reap",
    "pool",
    "sweep",
    "preflight",
]


def test_help_is_quick_and_names_every_command():
    def processor_s() -> float:
        spent = os.times()
        return spent.children_user + spent.children_system

    spent_s = []
    for _ in range(3):
        before = processor_s()
        answer = relay_process("--help")
        spent_s.append(processor_s() - before)
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", answer.out, re.MULTILINE), command
    # Of the processor, since the machine may be busy: Python and typer alone need 0.15 s.
    assert min(spent_s) < 0.6


def test_nothing_heavy_is_imported_before_it_is_needed():
    script = "import sys, flows.command; print(*sorted(m for m in ('pydantic', 'google', 'asyncssh', 'jax', 'prefect', "
    script += "'numpy', 'gcsfs', 'rich') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_runs_lists_every_run(shown: Track, terminal: Terminal):
    assert terminal.relay("fork", "done@20", "listed", "--set", "seed=9").code == 0
    answer = terminal.relay("runs")
    lines = {line.split()[0]: line for line in answer.out.splitlines()}
    assert re.fullmatch(r"done +40 of 40 +–  \d{4}-\d\d-\d\d \d\d:\d\d  finished", lines["done"])
    assert re.search(r"20 of 40 .* not started; forked from done@20$", lines["listed"])
    files.write(f"{shown.directory('done')}/report/figures.json", b'{"dollars": 12.345}')
    assert re.search(r"^done +40 of 40 +\$12.35  ", terminal.relay("runs").out, re.MULTILINE)


def test_an_empty_bucket_says_how_to_begin(shown: Track, terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b?project=p"
    data = json.dumps({"name": "another-bucket"}).encode()
    urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})).close()
    monkeypatch.setenv("TPU_RELAY_BUCKET", "gs://another-bucket/")
    answer = terminal.relay("runs")
    assert (answer.code, answer.out) == (
        0,
        "no runs in gs://another-bucket yet: python -m flows.train deployments/runs/icl.yaml\n",
    )


def test_show_tells_what_a_run_is_and_what_happened(shown: Track, terminal: Terminal):
    files.write(f"{shown.directory('done')}/report/report.md", b"# Run done: finished\n")
    answer = terminal.relay("show", "done")
    assert answer.code == 0
    assert answer.out.startswith("done: finished\n")
    assert re.search(r"^slice +spot v4-8 in us-central2-b$", answer.out, re.MULTILINE)
    assert re.search(
        r"^cost +price not set \(\d+ s of spot v4-8 in us-central2-b\)", answer.out, re.MULTILINE
    )
    assert re.search(r"^checkpoints +20 \(attempt 1\), 40 \(attempt 1\)$", answer.out, re.MULTILINE)
    assert re.search(r"attempt 1 starts from step 0 on \S+$", answer.out, re.MULTILINE)
    assert re.search(r"attempt 1 ended: finished, .*; last commit step 40$", answer.out, re.MULTILINE)
    assert answer.out.endswith("\n\n# Run done: finished\n\n")


def test_show_renders_the_report_on_a_terminal(shown: Track):
    cells = f"| | |\n| --- | --- |\n| hash | `{'c' * 150}` |\n| ended | once<br>twice |\n"
    report = f"# Run done: finished\n\n{cells}\n![loss by step](loss.png)\n"
    files.write(f"{shown.directory('done')}/report/report.md", report.encode())
    ours, its = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        with open(its, "wb") as end:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.command", "show", "done"], stdin=subprocess.DEVNULL, stdout=end,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
            )  # fmt: skip
        printed = b""
        # Linux ends a terminal that nobody holds any more with EIO.
        with contextlib.suppress(OSError):
            while part := terminal.read(65536):
                printed += part
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", printed.decode())
    assert re.search(r"^ +Run done: finished +\r$", text, re.MULTILINE)
    assert "once; twice" in text
    assert "".join(re.findall("c{20,}", text)) == "c" * 150  # broken, not cut
    assert f"loss by step: {shown.directory('done')}/report/loss.png" in text
    assert "|" not in text


def test_logs_are_those_of_the_host_and_attempt(shown: Track, terminal: Terminal):
    answer = terminal.relay("logs", "done")
    assert answer.out == "attempt 1 begins at step 0\nattempt 1 finished step 40\n"
    assert terminal.relay("logs", "done", "--attempt", "1", "--host", "0").out == answer.out
    # Nobody drives it any more, so following it ends.
    assert terminal.relay("logs", "done", "--follow").out == answer.out
    assert terminal.relay("logs", "done", "--attempt", "2").sentence == "done has no attempt 2: it has 1 to 1"
    for follow in ([], ["--follow"]):
        answer = terminal.relay("logs", "done", "--host", "3", *follow)
        assert (answer.code, answer.sentence) == (2, "done has 1 host: 0")


def test_export_gives_plain_files(shown: Track, terminal: Terminal, tmp_path: Path):
    answer = terminal.relay("export", "done@20", "--to", str(tmp_path / "out"))
    arrays, about = (Path(line) for line in answer.out.splitlines())
    assert (arrays.name, about.name) == ("done-step20.safetensors", "done-step20.json")
    assert parameters_digest(load_file(arrays), prefix="") == shown.digest("done", 20)
    described = json.loads(about.read_text())
    assert described["step"] == 20
    assert described["configuration"]["config"]["name"] == "done"
    (tmp_path / "file").write_text("")
    refused = terminal.relay("export", "done@20", "--to", str(tmp_path / "file"))
    assert (refused.code, "file" in refused.sentence) == (1, True)


def test_evaluate_prints_the_figures_and_what_could_not_be_evaluated(shown: Track, terminal: Terminal):
    refused = terminal.relay("evaluate", "done")
    assert (refused.code, refused.sentence.split(":")[0]) == (
        2, "done has a program of its own and no evaluate_command, so nothing knows how to evaluate it"
    )  # fmt: skip
    script = "if [ $RELAY_STEP = 20 ]; then echo broken >&2; exit 1; fi; echo '{\"loss\": 0.5}'"
    command = json.dumps(["/bin/sh", "-c", script])
    assert terminal.relay("fork", "done@20", "judged", "--set", f"evaluate_command={command}").code == 0
    answer = terminal.relay("evaluate", "judged@20")
    assert answer.code == 1
    assert (
        "**Step 20 could not be evaluated:**\n\n    evaluation of step 20 exited 1:\n    broken" in answer.out
    )
    assert terminal.relay("fork", "done@40", "judged-well", "--set", f"evaluate_command={command}",
                          "--set", "steps=60").code == 0  # fmt: skip
    answer = terminal.relay("evaluate", "judged-well", "--all")
    assert (answer.code, "| loss | 0.5 |" in answer.out) == (0, True)


def test_verify_finds_a_flipped_byte(shown: Track, terminal: Terminal):
    assert terminal.relay("fork", "done@20", "broken", "--set", "seed=1").code == 0
    whole = terminal.relay("verify", "broken")
    assert whole.code == 0
    assert re.fullmatch(r"step +20 attempt +0  whole, \d+ files, \d+ bytes\n", whole.out)
    folder = checkpoint_url(shown.directory("broken"), 20, 0)
    shard = next(url for url in files.names(folder) if url.endswith(".safetensors"))
    data = bytearray(files.read(shard))
    data[-1] ^= 1
    files.write(shard, bytes(data))
    damaged = terminal.relay("verify", "broken")
    assert damaged.code == 1
    assert "DAMAGED" in damaged.out
    assert damaged.sentence == "1 of 1 checkpoints of broken are damaged"
    assert terminal.relay("export", "broken@20", "--to", "unused").code == 1


def test_extend_and_fork(shown: Track, terminal: Terminal):
    made = terminal.relay("fork", "done@40", "next", "--set", "steps=50", "--set", "variables.A=b c")
    assert made.out == "next begins at step 40 of done; start it: python -m flows.train --resume next\n"
    record = load_record(shown.directory("next"))
    assert (record.config.steps, record.config.variables["A"]) == (50, "b c")
    assert terminal.relay("extend", "next", "--steps", "60").out == (
        "next has 60 steps now, 50 before; go on: python -m flows.train --resume next\n"
    )
    assert "extended       from 50 to 60 steps" in terminal.relay("show", "next").out
    assert (
        terminal.relay("fork", "done@40", "dear", "--set", "steps=50", "--set", "slice.price_an_hour=2").code
        == 0
    )
    assert terminal.relay("extend", "dear", "--max-cost", "$12.5", "--steps", "55").out == (
        "dear may cost $12.50 in all and has 55 steps now, 50 before; go on: python -m flows.train --resume dear\n"
    )
    assert load_record(shown.directory("dear")).config.max_cost == 12.5
    assert terminal.relay("extend", "dear", "--max-cost", "none").out.startswith("dear has no max_cost now; ")
    spent = V4_8 | {"slice": "a", "price_an_hour": 2.0, "chips": [0, 1, 2, 3]}
    hours = iter([0.0, 3 * 3600])
    log = EventLog(shown.directory("dear"), 1, lambda: next(hours))
    log.append("slice-leased", **spent)
    log.append("slice-released", slice="a", why="its end")
    refused = terminal.relay("extend", "dear", "--max-cost", "6", "--steps", "70")
    assert refused.code == 2
    assert refused.sentence.startswith("dear has spent $6.00 already, so with a max_cost of $6.00")
    assert refused.sentence.endswith("relay extend dear --max-cost N, N above 6.00, or none")
    config = load_record(shown.directory("dear")).config
    assert (config.max_cost, config.steps) == (None, 55)
    assert terminal.relay("extend", "dear", "--max-cost", "7").code == 0
    assert terminal.relay("stop", "next").out.startswith("stopped: no gang and no slice is left; ")


def test_preflight_exits_1_when_something_is_wrong_and_says_what_mends_it(
    shown: Track, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    ready = terminal.relay("preflight", "--set", "slice.zone=us-central2-b")
    assert (ready.code, ready.err) == (0, ""), ready.out
    assert re.search(r"^ok    spot v4-8 in us-central2-b: offered, ", ready.out, re.MULTILINE)
    lacks = terminal.relay("preflight", "--set", "slice.external_ips=false", "--pool", "tpu")
    assert lacks.code == 1
    assert re.search(r"^WRONG settings for spot v4-8 .*TPU_RELAY_SSH_ROUTE", lacks.out, re.MULTILINE)
    assert re.search(r"^WRONG Prefect server: .*; mend: make up$", lacks.out, re.MULTILINE)


def test_reap_says_what_it_would_do_and_does_it(shown: Track, terminal: Terminal):
    said = terminal.relay("reap", "--dry-run")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("# Reaper: 0 slices would be deleted\n")
    assert "0 slices would be deleted; 0 slices of ours left alone." in said.out
    assert "A dry run: nothing was changed." in said.out
    assert terminal.relay("reap").out.startswith("# Reaper: 0 slices deleted")
    wrong = terminal.relay("reap", "--pool", "defualt")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.sentence.startswith("there is no pool defualt in ")


def test_a_finished_run_has_nothing_to_stop(shown: Track, terminal: Terminal):
    assert terminal.relay("stop", "done").out == "done is finished; nothing to stop\n"


def test_the_log_of_an_attempt_that_has_just_begun_is_on_its_way(shown: Track):
    run_dir = shown.directory("young")
    shown.record("young")
    update_fence(run_dir, lambda fence: open_attempt(fence, 1))
    EventLog(run_dir, 1, lambda: 1000.0).append("attempt-started", attempt=1, slice="s", resume=None)
    with pytest.raises(
        NoLog, match=r"attempt 1 of young began 4 s ago, .* every 10 s: try again, or use --follow"
    ):
        read_log(run_dir, "young", None, 0, now=lambda: 1004.0)
    with pytest.raises(NoLog, match="host 0 of attempt 1 of young has no log in the bucket"):
        read_log(run_dir, "young", None, 0, now=lambda: 1100.0)


def test_a_foreign_command_that_failed_is_shown_without_steps(shown: Track, terminal: Terminal):
    run_dir = shown.directory("foreign")
    shown.record("foreign", contract=False)
    claim(run_dir, this_process("test"), None).release()
    log = EventLog(run_dir, 1, time.time)
    log.append("attempt-started", attempt=1, slice="s", resume=None)
    log.append(
        "attempt-ended", attempt=1, slice="s", verdict="user failure", reason="w0: exit code 1", last_commit=None,
        steps=40,
    )  # fmt: skip
    line = next(line for line in terminal.relay("runs").out.splitlines() if line.startswith("foreign "))
    assert re.search(r" a command +\$0.00  \S+ \S+  failed: user failure, w0: exit code 1$", line)
    answer = terminal.relay("show", "foreign")
    assert answer.out.startswith("foreign: failed: user failure, w0: exit code 1\n")
    assert "step" not in answer.out
    assert "checkpoints" not in answer.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["show", "none"],
            "there is no run none in gs://relay-emulated; `relay runs` lists those that are, and",
        ),
        (["show", "a/b"], "a run's name has lower-case letters, digits and dashes; found 'a/b'"),
        (["show", ""], "a run's name has lower-case letters, digits and dashes; found ''"),
        (["logs", "none", "--follow"], "there is no run none"),
        (["ssh", "none"], "there is no run none"),
        (["stop", "none"], "there is no run none"),
        (["profile", "none"], "there is no run none"),
        (["verify", "none"], "there is no run none"),
        (["extend", "none", "--steps", "9"], "there is no run none"),
        (["export", "done"], "write RUN@STEP, such as icl@500; found 'done'"),
        (["export", "done@"], "write RUN@STEP"),
        (["export", "@20"], "write RUN@STEP"),
        (["export", "done@2o"], "write RUN@STEP"),
        (["export", "done@-1"], "write RUN@STEP"),
        (["export", "done@30"], "no checkpoint at step 30; it has: 20, 40"),
        (["fork", "done@20", "done"], "there is a run done already; nothing was changed"),
        (["fork", "done@20", "New"], "name: "),
        (["fork", "done@20", "new", "--set", "seed"], "write FIELD=VALUE"),
        (["fork", "done@20", "new", "--set", "seed=[1"], "seed"),
        (["fork", "done@40", "new"], "begins at step 40 and would end at 40: --set steps=N"),
        (["fork", "none@40", "new"], "there is no run none"),
        (["extend", "done", "--steps", "40"], "done has 40 steps already; give more than that"),
        (["extend", "done"], "say what to extend: --steps N, --max-cost DOLLARS, or both"),
        (["extend", "done", "--max-cost", "much"], "write dollars, such as 12.50, or none; found 'much'"),
        (["extend", "done", "--max-cost", "5"], "max_cost cannot be held without the price of spot v4-8"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(terminal: Terminal, words: list[str], sentence: str):
    answer = terminal.relay(*words)
    assert sentence in answer.sentence
    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["extend", "done", "--steps", "0"],
        ["dance"],
        ["logs", "done", "--host", "-1"],
    ],
)
def test_words_that_the_command_does_not_know(terminal: Terminal, words: list[str]):
    answer = terminal.relay(*words)
    assert answer.code == 2
    assert "relay" in answer.err
    assert "Traceback" not in answer.err


def test_a_run_without_a_slice_cannot_be_entered(terminal: Terminal):
    told = "done has no slice now: start it with `python -m flows.train --resume done`"
    assert (terminal.relay("ssh", "done").code, terminal.relay("ssh", "done").sentence) == (1, told)
    answer = terminal.relay("profile", "done")
    assert (answer.code, answer.sentence) == (1, "done does not train now; `relay show done` tells more")


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"TPU_RELAY_PROJECT": ""}, 2, "no project: set TPU_RELAY_PROJECT"),
        ({"TPU_RELAY_BUCKET": "my-bucket"}, 2, "TPU_RELAY_BUCKET must name a bucket such as gs://my-runs"),
        ({"TPU_RELAY_BUCKET": "gs://not-there"}, 1, "there is no bucket gs://not-there: create it"),
        ({"TPU_RELAY_SSH_PORT": "none"}, 2, "TPU_RELAY_SSH_PORT must be a port"),
    ],
)
def test_settings_that_lead_nowhere(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], code: int, sentence: str
):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    for words in (["runs"], ["show", "done"], ["export", "done@20"]):
        answer = terminal.relay(*words)
        assert sentence in answer.sentence
        assert answer.code == code


def test_a_bucket_that_does_not_answer_is_known_soon(free_port: int):
    began = time.monotonic()
    answer = relay_process("runs", STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{free_port}")
    assert answer.code == 1
    assert "asking for gs://relay-emulated: the bucket refused" in answer.sentence
    assert time.monotonic() - began < 30


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port at which nobody listens, held so that nobody takes it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_V1_zones_says_what_is_known_and_forgets_it(shown: Track, terminal: Terminal):
    url = f"{shown.emulator.env['TPU_RELAY_BUCKET']}/pools/zone-health.json"
    assert terminal.relay("zones", "--forget", "us-east5-a").out == "nothing bad is known of any zone\n"
    known = PlaceHealth()
    for number in range(8):
        known = noted(known, "stockout", (now := time.time() + number), now)
    health = ZoneHealth().having(Candidate("us-east1-d", "v6e-8", "spot"), known)
    health = health.having(Candidate("us-east5-a", "v6e-8", "spot"), closed(PlaceHealth(), "TPUV6E"))
    files.write(url, json.dumps(to_json(health)).encode())
    told = terminal.relay("zones").out.splitlines()
    assert re.fullmatch(
        r"spot v6e-8 in us-east1-d: not asked before [\d:]+: .*no capacity; in .*: 8 stock.*", told[0]
    )
    assert told[1].startswith(
        "spot v6e-8 in us-east5-a: never asked, the project has none of the quota 'TPUV6E'"
    )
    told = terminal.relay("zones", "--forget", "us-east5-a").out.splitlines()
    assert [line[:26] for line in told] == ["spot v6e-8 in us-east1-d: "]
    files.write(url, b"[1")
    damaged = terminal.relay("zones")
    assert damaged.code == 1
    assert "zone-health.json cannot be understood" in damaged.sentence
    files.remove([url])


async def test_status_says_why_there_is_no_slice_while_it_is_waited_for(shown: Track, terminal: Terminal):
    directory = shown.directory("done")
    assert terminal.relay("status", "done").out == "done: finished; step 40 of 40\n"
    async with shown_waiting(directory, SystemClock()) as waiting:
        waiting.say("spot v4-8 in us-central2-b", "waiting for capacity")
        seen = await asyncio.to_thread(
            shown.emulator.wait_for, lambda: load_waiting(directory), "it is shown in the bucket"
        )
        assert seen is not None
        assert seen.lines == ("spot v4-8 in us-central2-b: waiting for capacity",)
        # What a driver that died has left is not told as if it were so now.
        assert terminal.relay("status", "done").out == "done: finished; step 40 of 40\n"
    assert load_waiting(directory) is None
