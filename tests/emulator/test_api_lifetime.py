"""An emulator starts, lives beside others, and whatever way it ends leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.api import api_of
from tpu.emulator.emulator import (
    RECORD_NAME,
    Emulator,
    EmulatorFailed,
    EmulatorRecord,
    read_record,
    remaining,
)


def boot_a_node(
    emulator: Emulator, node_id: str = "n", script: str = "sleep 1000 & disown; sleep 1000", **fields: Any
) -> str:
    """Make a two-host node whose startup-script leaves processes about; return its first address."""

    async def boot() -> str:
        async with api_of(emulator) as api:
            operation = await api.create_node(
                node_id,
                accelerator_type="v4-16",
                metadata={"startup-script": f"#!/bin/bash\n{script}\n"},
                **fields,
            )
            node = await api.finish(operation)
            return node.network_endpoints[0].ip_address

    return asyncio.run(boot())


def scrubbed(mark: str) -> list[int]:
    """Return the pids of processes whose arguments hold `mark`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def test_a_daemon_that_hides_where_it_comes_from_goes_with_its_host(emulator: Emulator):
    mark = f"98765.{os.getpid()}"
    boot_a_node(emulator, script=f"setsid env -i bash -c 'sleep {mark} & disown' &\nexit 0")
    emulator.wait_for(lambda: len(scrubbed(mark)) >= 2, "a daemon on each host")
    try:
        emulator.reset()
        assert scrubbed(mark) == []
    finally:
        for pid in scrubbed(mark):
            os.kill(pid, signal.SIGKILL)


def wait_until_nothing_remains(record: EmulatorRecord) -> None:
    deadline = time.monotonic() + 20
    while left := remaining(record):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


def test_stopped_in_order_it_leaves_nothing():
    with Emulator() as emulator:
        boot_a_node(emulator)
        assert len(emulator.processes()) >= 6  # of each host: first process, SSH server, what the script left
    assert remaining(emulator.record) == []
    assert not emulator.state_dir.exists()
    emulator.stop()  # twice does no harm


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ended_by_a_signal_it_leaves_nothing(number: signal.Signals):
    mark = f"8765{number.value}.{os.getpid()}"
    emulator = Emulator()
    try:
        boot_a_node(emulator, script=f"sleep 1000 &\nsetsid env -i bash -c 'sleep {mark} & disown' &\nexit 0")
        emulator.wait_for(lambda: len(scrubbed(mark)) >= 2, "a daemon on each host")
        os.kill(emulator.pid, number)
        emulator._process.wait(20)
        wait_until_nothing_remains(emulator.record)
        assert not emulator.state_dir.exists()
        assert scrubbed(mark) == []
    finally:
        emulator.stop()
        for pid in scrubbed(mark):
            os.kill(pid, signal.SIGKILL)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path):
    program = (
        "import sys, time\n"
        "from tpu.emulator.emulator import Emulator\n"
        f"emulator = Emulator({str(tmp_path)!r})\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"up\n"
    record = read_record(tmp_path)
    assert record is not None
    starter.kill()
    starter.communicate()
    wait_until_nothing_remains(record)
    assert not (tmp_path / RECORD_NAME).exists()


def test_two_run_side_by_side(emulator: Emulator):
    with Emulator() as other:
        addresses = {boot_a_node(emulator, "same-name"), boot_a_node(other, "same-name")}
        assert len({address.split(".")[1] for address in addresses}) == 2
        assert emulator.env["TPU_RELAY_API_KEY"] != other.env["TPU_RELAY_API_KEY"]
        assert not set(emulator.processes()) & set(other.processes())
        other.reset()
        assert other.nodes() == []
        assert [node["node"] for node in emulator.nodes()] == ["same-name"]
    assert emulator.processes()


def test_a_state_folder_belongs_to_one_emulator(tmp_path: Path):
    with Emulator(tmp_path), pytest.raises(EmulatorFailed, match="already uses"):
        Emulator(tmp_path)
    assert tmp_path.exists()  # it was given, so it is not removed
    assert not (tmp_path / RECORD_NAME).exists()


def test_its_objects_outlive_it_in_a_folder_of_its_own(tmp_path: Path):
    first = Emulator(tmp_path)
    boot_a_node(first)
    storage(first, "/upload/storage/v1/b/relay-emulated/o?uploadType=media&name=kept", b"as it was")
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    with Emulator(tmp_path) as second:
        assert second.nodes() == []
        assert storage(second, "/storage/v1/b/relay-emulated/o/kept?alt=media") == b"as it was"


def storage(emulator: Emulator, path: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(emulator.env["STORAGE_EMULATOR_HOST"] + path, data=data)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return answer.read()


def test_the_record_of_a_dead_emulator_names_nobody_else(tmp_path: Path):
    """A pid comes back: `down` must not end the process that has it now."""
    env = {"TPU_RELAY_API_KEY": "k"}
    EmulatorRecord("none", os.getpid(), 1, os.getpid(), "http://127.0.0.1:1", env).write(tmp_path)
    assert read_record(tmp_path) is None
    assert "no emulator runs" in run(tmp_path, "down")


def test_down_in_another_folder_says_that_the_emulator_of_the_environment_lives(
    emulator: Emulator, tmp_path: Path
):
    done = subprocess.run(
        [sys.executable, "-m", "tpu.emulator", "down"], cwd=tmp_path, env=os.environ | emulator.env,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "was started in another folder" in done.stderr
    assert emulator.nodes() == []  # it answers


def test_its_files_are_for_their_owner_only(emulator: Emulator):
    assert (emulator.state_dir / RECORD_NAME).stat().st_mode & 0o077 == 0
    assert emulator.state_dir.stat().st_mode & 0o077 == 0


def test_it_says_what_is_wrong_when_it_cannot_start(tmp_path: Path):
    with pytest.raises(EmulatorFailed, match="threads on this machine, not 10000"):
        Emulator(tmp_path, host_threads=10_000)


def test_everything_listens_on_loopback_only(emulator: Emulator):
    boot_a_node(emulator)
    pids = remaining(emulator.record)
    sockets = {link for pid in pids for link in _sockets(pid)}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append((table, fields[1].split(":")[0]))
    assert len(listening) >= 8  # API, control, storage, the lock, and two of each host
    # Written in the machine's byte order: 127 stands at the end. gRPC writes it as an IPv6 address.
    assert all(address.endswith("7F") for _, address in listening), listening
    mapped = "0000000000000000FFFF0000"
    assert all(address.startswith(mapped) for table, address in listening if table == "tcp6"), listening


def _sockets(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except FileNotFoundError:
        return []


def command(
    *arguments: str, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command as somebody types it in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "tpu.emulator", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=os.environ | environment,
    )


def run(tmp_path: Path, *arguments: str, succeeds: bool = True) -> str:
    done = command(*arguments, "--state", str(tmp_path))
    assert (done.returncode == 0) == succeeds, done.stderr
    return done.stdout if succeeds else done.stderr


def test_the_command_starts_looks_disturbs_and_stops(tmp_path: Path):
    assert "no emulator runs in" in run(tmp_path, "status", succeeds=False)
    printed = run(tmp_path, "up")
    try:
        record = read_record(tmp_path)
        assert record is not None
        assert f"export TPU_RELAY_API_KEY={record.key}" in printed
        assert run(tmp_path, "env") == printed
        again = command("up", "--state", str(tmp_path))
        assert again.stdout == printed  # a second one is the same one, and says so
        assert again.stderr == (
            f"an emulator runs in {tmp_path} already (process {record.pid}); this is its environment\n"
        )
        told = run(tmp_path, "capacity", "us-central2-b", "v4-8", "3")
        assert told == "us-central2-b holds at most 3 slice(s) of v4-8 now\n"
        run(tmp_path, "quota", "us-central2-b", "v4-8", "none")
        run(tmp_path, "delay", "2.5")
        run(tmp_path, "stockout", "us-east5-b", "v6e-8")
        run(tmp_path, "queues", "us-west4-a", "--off")
        run(tmp_path, "life", "600")
        run(tmp_path, "schedule", "--seed", "1", "--mean", "60")
        settings = json.loads(run(tmp_path, "status"))["settings"]
        assert settings["capacity"] == {"us-central2-b/v4-8": 3}
        assert settings["provisioning_delay_s"] == 2.5
        assert settings["stockouts"] == ["us-east5-b/v6e-8"]
        assert settings["without_queues"] == ["us-west4-a"]
        assert settings["preemptible_life_s"] == 600
        assert "no node 'x'" in run(tmp_path, "preempt", "x", succeeds=False)
        assert "no node 'x'" in run(tmp_path, "kill-host", "x", "1", succeeds=False)
        assert "no node 'x'" in run(tmp_path, "repair", "x", succeeds=False)
        for_gcloud = run(tmp_path, "env", "--gcloud")
        assert f"CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU={record.env['TPU_RELAY_REST_ENDPOINT']}/" in for_gcloud
        token = tmp_path / "gcloud-token"
        assert f"CLOUDSDK_AUTH_ACCESS_TOKEN_FILE={token}" in for_gcloud
        assert (token.read_text(), token.stat().st_mode & 0o777) == (record.key, 0o600)
        assert record.key not in for_gcloud
    finally:
        run(tmp_path, "down")
    assert remaining(record) == []
    assert not token.exists()
    assert "no emulator runs in" in run(tmp_path, "down")


def test_the_command_in_another_folder_follows_the_environment(emulator: Emulator, tmp_path: Path):
    boot_a_node(emulator, scheduling_config={"spot": True})
    preempted = command("preempt", "n", folder=tmp_path)
    assert (preempted.returncode, preempted.stdout) == (0, "preempted n: its hosts are dead\n")
    assert emulator.preempted() == ["n"]
    assert f"export TPU_RELAY_API_KEY={emulator.record.key}\n" in command("env", folder=tmp_path).stdout
    # A folder that was named is meant, whatever the environment says.
    assert "no emulator runs in" in run(tmp_path, "status", succeeds=False)


@pytest.mark.parametrize(
    ("control", "why"),
    [
        ("", "TPU_EMULATOR_CONTROL not set"),
        ("http://127.0.0.1:1", "no emulator answers at http://127.0.0.1:1"),
    ],
)
def test_the_command_says_where_it_looked_for_an_emulator(tmp_path: Path, control: str, why: str):
    done = command("status", folder=tmp_path, TPU_EMULATOR_CONTROL=control, TPU_RELAY_API_KEY="k")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: no emulator runs in {tmp_path}/.relay/emulator, and the environment leads to none ("
    )
    assert why in done.stderr


def test_the_command_explains_itself():
    done = subprocess.run(
        [sys.executable, "-m", "tpu.emulator", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for command in ("up", "down", "status", "env", "preempt", "kill-host", "hang-host", "busy-chips",
                    "capacity", "quota", "delay", "stockout", "schedule", "serve"):  # fmt: skip
        assert command in done.stdout
