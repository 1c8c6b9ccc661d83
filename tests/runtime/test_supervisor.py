"""The supervisor with real processes: what it starts, shows, stores and ends."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.supervised import SUPERVISOR, Cloud, Home, eventually
from tpu.runtime import supervisor

FOREVER = "while :; do sleep 1000; done"
SECRET = "hunter2-of-the-lab"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


@pytest.fixture
def cloud(home: Home) -> Iterator[Cloud]:
    made = Cloud()
    home.environment["STORAGE_EMULATOR_HOST"] = f"http://{made.address}"
    home.environment["GCE_METADATA_HOST"] = made.address
    yield made
    made.close()


def lines(records: list[dict]) -> list[str]:
    return [record["line"] for record in records if record["k"] == "log"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class TestStart:
    def test_a_program_outlives_who_started_it_and_its_end_is_known(self, home: Home) -> None:
        assert home.start("echo hello; exit 3")["started"]
        records = home.follow()
        assert lines(records) == ["hello"]
        assert {**records[-1], "t": 0} == {"k": "exit", "code": 3, "signal": None, "reason": None, "t": 0}
        assert home.status()["state"] == "exited"

    def test_starting_again_takes_up_the_first(self, home: Home) -> None:
        home.start(FOREVER)
        first = home.pid("child")
        again = home.start("echo another program")
        assert (again["rc"], again["started"], again["state"]) == (0, False, "running")
        assert home.pid("child") == first

    def test_two_starts_at_once_start_one_program(self, home: Home) -> None:
        spec = json.dumps({"host": "h", "argv": ["bash", "-c", f"echo one; {FOREVER}"], "metadata": "off"})
        both = [
            subprocess.Popen(
                home.command("start", home.folder()),
                env=home.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        answers = [json.loads(process.communicate(spec)[0]) for process in both]
        assert sorted(answer["started"] for answer in answers) == [False, True]
        eventually(lambda: home.log() == "one\n", "one line of one program")

    def test_the_program_sees_its_environment_files_and_folder(self, home: Home) -> None:
        (home.path / "code").mkdir()
        home.environment["MEGASCALE_PORT"] = "stale"
        home.start(
            "pwd; echo $RELAY_ATTEMPT_ID $A ${MEGASCALE_PORT-unset}; cat $RELAY_CONFIG; stat -c %a $RELAY_CONFIG;"
            "echo $RELAY_EVENTS",
            attempt=7,
            env={"A": "${HOME}/x:${RELAY_ATTEMPT_DIR}/y"},
            unset=["MEGASCALE_PORT"],
            files={"config.json": '{"steps": 5}\n'},
            cwd="${HOME}/code",
        )
        folder = home.folder(attempt=7)
        assert lines(home.follow(7)) == [
            f"{home.path}/code",
            f"r/7 {home.path}/x:{folder}/y unset",
            '{"steps": 5}',
            "600",
            f"{folder}/events.jsonl",
        ]

    def test_a_program_that_cannot_be_started_ends_with_a_reason(self, home: Home) -> None:
        home.start(["/no/such/program"])
        records = home.follow()
        assert "/no/such/program" in lines(records)[0]
        assert (records[-1]["k"], records[-1]["code"]) == ("exit", 127)
        assert "No such file" in records[-1]["reason"]

    def test_an_attempt_that_was_ended_never_starts(self, home: Home) -> None:
        assert home.end()["confirmed"]
        refused = home.start("echo never")
        assert refused["rc"] != 0
        assert "ended" in refused["error"]
        assert home.status()["state"] == "absent"

    def test_an_older_attempt_is_refused_once_a_newer_one_was_started(self, home: Home) -> None:
        home.start(FOREVER, attempt=2)
        refused = home.start("echo never", attempt=1)
        assert refused["rc"] != 0
        assert "attempt 2" in refused["error"]

    def test_one_file_of_the_standard_library_for_python_3_10(self) -> None:
        tree = ast.parse(Path(SUPERVISOR).read_text(), feature_version=(3, 10))
        imported = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names

    def test_it_runs_under_python_3_10(self, tmp_path: Path) -> None:
        found = shutil.which("python3.10")
        if not found or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
            pytest.skip("there is no Python 3.10 here")
        home = Home(tmp_path, python=found)
        home.start("echo hello")
        assert lines(home.follow()) == ["hello"]
        home.close()


class TestOutput:
    def test_followers_go_on_from_their_offsets(self, home: Home) -> None:
        home.start('for i in 1 2 3 4; do echo line $i; echo "{\\"event\\": $i}" >> $RELAY_EVENTS; done')
        records = home.follow()
        logs = [r for r in records if r["k"] == "log"]
        events = [r for r in records if r["k"] == "event"]
        again = home.follow(log=logs[1]["o"], events=events[2]["o"])
        assert lines(again) == ["line 3", "line 4"]
        assert [r["record"] for r in again if r["k"] == "event"] == [{"event": 4}]

    def test_an_unfinished_last_line_is_shown_at_the_end(self, home: Home) -> None:
        home.start("echo whole; printf 'no newline'")
        assert lines(home.follow()) == ["whole", "no newline"]

    def test_an_unfinished_line_is_shown_while_the_program_waits(self, home: Home) -> None:
        home.start(f"printf 'waiting for input'; {FOREVER}")
        eventually(lambda: home.log() == "waiting for input\n", "the line is written")

    def test_a_progress_bar_does_not_become_a_thousand_lines(self, home: Home) -> None:
        home.start("for i in $(seq 1000); do printf '\\rstep %d' $i; done; printf '\\n'; printf 'dos\\r\\n'")
        assert lines(home.follow()) == ["step 1000", "dos"]

    def test_a_follower_beats_while_nothing_happens(self, home: Home) -> None:
        home.start(FOREVER)
        with home.open_follower() as follower:
            assert follower.stdout
            begun = time.monotonic()
            assert [json.loads(follower.stdout.readline())["k"] for _ in range(2)] == ["beat", "beat"]
            assert time.monotonic() - begun < 4
            follower.kill()

    def test_100_mb_are_kept_whole_in_little_memory(self, home: Home) -> None:
        home.start(f"yes {'x' * 999} | head -n 100000; echo end; sleep 1000")
        log = home.folder() / "log"
        eventually(lambda: log.stat().st_size == 100_000_004, "all of the output is in the log", 60)
        assert _memory_mb(home.pid("supervisor")) < 60
        home.end()
        shown = lines(home.follow(log=90_000_000))
        assert (len(shown), shown[-1]) == (10_001, "end")

    def test_100_mb_without_a_newline_are_cut_into_lines(self, home: Home) -> None:
        home.start("head -c 100000000 /dev/zero | tr '\\0' x; echo; echo done")
        log = home.folder() / "log"
        eventually(lambda: home.status()["state"] == "exited", "the program has ended", 60)
        text = log.read_bytes()
        assert text.count(b"x") == 100_000_000
        assert text.endswith(b"\ndone\n")
        assert max(map(len, text.split(b"\n"))) < 200_000

    def test_a_program_that_closes_its_output_runs_on(self, home: Home) -> None:
        home.start("echo before; exec >&- 2>&-; sleep 0.5; exit 4")
        records = home.follow()
        assert lines(records) == ["before"]
        assert records[-1]["code"] == 4

    def test_broken_records_are_passed_over(self, home: Home) -> None:
        home.start(
            'cd $RELAY_ATTEMPT_DIR; printf \'{"event": 1}\\nnonsense\\n[1]\\n{"event": 2}\\n{"ev\' > events.jsonl'
        )
        assert [r["record"] for r in home.follow() if r["k"] == "event"] == [{"event": 1}, {"event": 2}]


class TestSecrets:
    def test_O7_a_secret_is_masked_in_the_log_and_in_the_bucket(self, home: Home, cloud: Cloud) -> None:
        home.start(
            "echo token $TOKEN; printf hunter2-; sleep 1.5; echo of-the-lab; printf '%s' $TOKEN | base64",
            env={"TOKEN": SECRET},
            secrets=[SECRET],
            log_target="gs://b/logs/1",
        )
        assert lines(home.follow()) == ["token ***", "***", "***"]
        eventually(lambda: cloud.text() == "token ***\n***\n***\n", "the log is in the bucket")

    def test_O7_every_line_of_a_secret_of_many_lines_is_masked(self, home: Home) -> None:
        home.start('echo "$KEY"', env={"KEY": "first line\nsecond line"}, secrets=["first line\nsecond line"])
        assert lines(home.follow()) == ["***", "***"]

    def test_O7_a_secret_is_on_no_disk_and_in_no_command_line(self, home: Home) -> None:
        home.start(f"echo ready; {FOREVER}", env={"TOKEN": SECRET}, secrets=[SECRET])
        eventually(lambda: home.log() == "ready\n", "the program runs")
        for path in home.path.rglob("*"):
            if path.is_file():
                assert SECRET.encode() not in path.read_bytes()
                assert path.stat().st_mode & 0o077 == 0
        for pid in home.processes():
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


class TestBucket:
    def test_O6_the_last_words_are_in_the_bucket_before_the_exit_is_known(
        self, home: Home, cloud: Cloud
    ) -> None:
        home.start(
            "echo early; sleep 0.2; echo last words; exit 1", log_target="gs://b/logs/1", upload_every_s=600
        )
        assert home.follow()[-1]["k"] == "exit"
        assert cloud.text() == "early\nlast words\n"
        assert list(cloud.objects) == ["b/logs/1/slice-w0-000000.log"]

    def test_new_lines_are_stored_while_the_program_runs(self, home: Home, cloud: Cloud) -> None:
        home.start(f"echo one; {FOREVER}", log_target="gs://b/logs/1", upload_every_s=0.2)
        eventually(lambda: cloud.text() == "one\n", "the line is in the bucket")
        os.kill(home.pid("supervisor"), signal.SIGKILL)

    def test_C7_a_refusing_bucket_disturbs_nobody_and_is_tried_again(self, home: Home, cloud: Cloud) -> None:
        cloud.refuse_uploads = 2
        home.start("echo one; sleep 1; echo two; exit 5", log_target="gs://b/logs/1", upload_every_s=0.1)
        assert home.follow()[-1]["code"] == 5
        eventually(lambda: cloud.text() == "one\ntwo\n", "all of the log is in the bucket")

    def test_C7_without_any_bucket_the_exit_is_known_soon(self, home: Home) -> None:
        home.environment["STORAGE_EMULATOR_HOST"] = "http://127.0.0.1:1"
        begun = time.monotonic()
        home.start("echo one", log_target="gs://b/logs/1")
        assert home.follow()[-1]["code"] == 0
        assert time.monotonic() - begun < 8


class TestPreemption:
    def test_P8_the_notice_becomes_sigterm_and_a_record(self, home: Home, cloud: Cloud) -> None:
        home.start("trap 'echo saving; exit 75' TERM; echo up; while :; do sleep 0.05; done", metadata=None)
        eventually(lambda: home.log() == "up\n", "the program runs")
        cloud.preempted = True
        records = home.follow()
        assert lines(records)[-1] == "saving"
        assert [r["source"] for r in records if r["k"] == "notice"] == ["metadata server: preempted"]
        assert records[-1]["code"] == 75

    def test_P8_who_ignores_the_notice_is_killed_after_the_grace(self, home: Home, cloud: Cloud) -> None:
        cloud.preempted = True
        home.start("trap '' TERM; echo deaf; while :; do sleep 0.05; done", metadata=None, grace_s=1.5)
        begun = time.monotonic()
        assert home.follow()[-1]["signal"] == signal.SIGKILL
        assert 0.5 < time.monotonic() - begun < 8

    def test_P8_a_child_of_a_shell_keeps_the_grace_to_save(self, home: Home, cloud: Cloud) -> None:
        """The shell dies of SIGTERM at once; the program it started has its time all the same."""
        inner = "trap 'sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
        home.start(f'bash -c "{inner}"; true', metadata=None, grace_s=20)
        eventually(lambda: home.log() == "up\n", "the program runs")
        cloud.preempted = True
        assert lines(home.follow())[-1] == "saved"

    def test_P8_sigterm_to_the_supervisor_is_a_notice_too(self, home: Home) -> None:
        home.start("trap 'exit 75' TERM; echo up; while :; do sleep 0.05; done")
        eventually(lambda: home.log() == "up\n", "the program runs")
        os.kill(home.pid("supervisor"), signal.SIGTERM)
        assert home.follow()[-1]["code"] == 75
        assert home.status()["notice"]["source"] == "SIGTERM to the supervisor"

    def test_the_metadata_server_may_be_away(self, home: Home) -> None:
        home.start("sleep 1.5; echo done", metadata="127.0.0.1:1")
        assert lines(home.follow()) == ["done"]


class TestDeath:
    def test_a_killed_supervisor_is_lost_and_leaves_no_orphan(self, home: Home) -> None:
        home.start(f"(setsid sleep 1000 &); bash -c '{FOREVER}' & echo up; wait")
        eventually(lambda: home.log() == "up\n", "the program runs")
        os.kill(home.pid("supervisor"), signal.SIGKILL)
        assert home.follow()[-1]["k"] == "lost"
        eventually(lambda: not home.processes(), "no process is left")
        assert home.status()["state"] == "lost"

    def test_a_killed_supervisor_and_keeper_leave_what_the_end_removes(self, home: Home) -> None:
        home.start("(setsid sleep 1000 &); echo up; sleep 1000")
        eventually(lambda: home.log() == "up\n", "the program runs")
        child = home.pid("child")
        os.kill(home.pid("keeper"), signal.SIGKILL)
        os.kill(home.pid("supervisor"), signal.SIGKILL)
        eventually(lambda: not alive(child), "the program died with its supervisor")
        assert home.end()["confirmed"]
        assert not home.processes()

    def test_a_killed_program_is_known_by_its_signal(self, home: Home) -> None:
        home.start("echo up; sleep 1000")
        eventually(lambda: home.log() == "up\n", "the program runs")
        os.kill(home.pid("child"), signal.SIGKILL)
        assert home.follow()[-1]["signal"] == signal.SIGKILL

    def test_G1_what_a_program_leaves_behind_is_ended_with_it(self, home: Home) -> None:
        home.start("(setsid sleep 1000 &); (setsid env -i /bin/sleep 1000 &); echo up; exit 0")
        records = home.follow()
        assert (lines(records), records[-1]["code"]) == (["up"], 0)
        eventually(lambda: not home.processes(), "no process is left")

    def test_following_what_was_never_started_says_so(self, home: Home) -> None:
        records = home.follow(9)
        assert [(r["k"], r["absent"]) for r in records] == [("lost", True)]


class TestEnd:
    def test_the_program_has_its_grace(self, home: Home) -> None:
        home.start("trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
        eventually(lambda: home.log() == "up\n", "the program runs")
        ended = home.end(grace_s=20)
        assert (ended["confirmed"], ended["state"], ended["exit"]["code"]) == (True, "exited", 0)
        assert home.log().endswith("\nsaved\n")
        assert not home.processes()

    def test_a_program_that_saves_is_waited_for_without_searching_the_host_again_and_again(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home.start("trap 'sleep 1; exit 0' TERM; while :; do sleep 0.05; done")
        searched: list[str] = []
        found = supervisor.gang_processes
        monkeypatch.setattr(supervisor, "gang_processes", lambda f: searched.append(f) or found(f))
        supervisor.send(supervisor.process(home.pid("child")), signal.SIGTERM)
        assert supervisor.until_left(str(home.folder()), 10.0)
        assert len(searched) < 8

    def test_who_ignores_sigterm_is_killed(self, home: Home) -> None:
        home.start(
            "trap '' TERM; (trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 1000' &); echo up; sleep 1000"
        )
        eventually(lambda: home.log() == "up\n", "the program runs")
        ended = home.end(grace_s=0.3)
        assert ended["confirmed"]
        assert ended["exit"]["signal"] == signal.SIGKILL
        assert not home.processes()

    def test_a_stopped_program_and_supervisor_are_ended(self, home: Home) -> None:
        home.start("sleep 1000")
        for role in ("child", "supervisor", "keeper"):
            os.kill(home.pid(role), signal.SIGSTOP)
        assert home.end()["confirmed"]
        assert not home.processes()

    def test_G7_the_next_attempt_starts_when_the_last_one_is_gone(self, home: Home) -> None:
        deaf = "trap '' TERM; (setsid bash -c 'trap \"\" TERM; sleep 1000' &); echo up; sleep 1000"
        home.start(deaf, attempt=1)
        eventually(lambda: home.log(1) == "up\n", "the first attempt runs")
        first = home.processes()
        assert home.start("sleep 1000", attempt=2)["started"]
        assert not first & home.processes()
        assert home.status(attempt=1)["ended"]

    def test_G6_other_runs_and_hosts_go_on(self, home: Home, tmp_path: Path) -> None:
        other = Home(tmp_path / "other-host")
        other.path.mkdir()
        home.start("sleep 1000", run="a")
        home.start("sleep 1000", run="b")
        other.start("sleep 1000", run="a")
        assert home.end("a")["confirmed"]
        assert home.status("b")["state"] == "running"
        assert other.status("a")["state"] == "running"
        other.close()

    def test_a_recycled_pid_is_never_killed(self, home: Home) -> None:
        home.start("exit 0")
        home.follow()
        bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (home.folder() / "child.json").write_text(json.dumps({"pid": bystander.pid, "start": 1}))
        assert home.end()["confirmed"]
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()


class TestCost:
    def test_it_costs_next_to_nothing(self, home: Home, cloud: Cloud) -> None:
        home.start(f"echo up; {FOREVER}", metadata=None, log_target="gs://b/logs/1")
        supervisor = home.pid("supervisor")
        eventually(lambda: cloud.asked >= 2, "it asks the metadata server")
        before, asked = _cpu_s(supervisor), cloud.asked
        eventually(lambda: cloud.asked >= asked + 3, "three seconds have passed")
        assert _cpu_s(supervisor) - before < 0.15
        assert _memory_mb(supervisor) < 50


def _memory_mb(pid: int) -> float:
    """The most it ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
