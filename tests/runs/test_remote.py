"""Reaching into a run that trains: its hosts by OpenSSH, its words as they come, a profile."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.conftest import Track, until
from tests.runs.terminal import Answer, relay_process
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.route import RouteError
from tpu.runs.event_log import RunEvent
from tpu.runs.remote import (
    HostNotReady,
    hosts_of,
    login_command,
    newest_slice,
    ssh_command,
)

KEY, KNOWN = Path("/home/me/.tpu-relay/id_ed25519"), Path("/home/me/.tpu-relay/pinned_hosts/r-w1")
HOST = HostAddress("r-1", 1, "10.0.0.3", "34.1.2.3", "ssh-ed25519 AAAA", "us-central2-b", "t1v-n-w-1")
needs_openssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here")


def connection(route: str) -> Connection:
    return Connection(
        project="p", bucket="gs://b", ssh_route=route, ssh_user="me", ssh_port=2222, home=KEY.parent
    )


def option(command: list[str], name: str) -> str | None:
    return next((word.removeprefix(f"{name}=") for word in command if word.startswith(f"{name}=")), None)


@pytest.mark.parametrize(
    ("route", "address", "proxy"),
    [
        ("external", "34.1.2.3", None),
        ("internal", "10.0.0.3", None),
        ("iap", "10.0.0.3", "gcloud compute start-iap-tunnel t1v-n-w-1 2222 --listen-on-stdin --project=p"),
        ("nc -X 5 -x 'my proxy:1%%' %h %p", "10.0.0.3", "nc -X 5 -x 'my proxy:1%%' 10.0.0.3 2222"),
        ("jump:you@bastion:2200", "10.0.0.3", "-p 2200 -l you -W '[10.0.0.3]:2222' bastion"),
    ],
)
def test_the_command_line_follows_the_route(route: str, address: str, proxy: str | None):
    command = ssh_command(connection(route), HOST, KEY, KNOWN, ["ls", "-l"])
    assert command[0] == "ssh"
    assert command[-7:] == ["-p", "2222", "-l", "me", address, "ls", "-l"]
    found = option(command, "ProxyCommand")
    assert found is None if proxy is None else proxy in (found or "")
    if route.startswith("jump"):
        assert f'UserKnownHostsFile="{KEY.parent}/known_hosts"' in shlex.split(found or "")


def test_nothing_of_the_user_takes_part_and_the_host_key_is_pinned():
    command = ssh_command(connection("external"), HOST, KEY, KNOWN)
    assert command[1:3] == ["-F", "none"]
    assert option(command, "StrictHostKeyChecking") == "yes"
    assert option(command, "HostKeyAlias") == "r-1-w1"
    assert option(command, "UserKnownHostsFile") == f'"{KNOWN}"'
    assert option(command, "GlobalKnownHostsFile") == "/dev/null"
    assert option(command, "IdentityFile") == f'"{KEY}"'
    assert (option(command, "IdentitiesOnly"), option(command, "IdentityAgent")) == ("yes", "none")


def test_a_route_that_cannot_lead_there():
    with pytest.raises(RouteError, match="has no external address"):
        ssh_command(connection("external"), replace(HOST, external=None), KEY, KNOWN)


@needs_openssh
def test_openssh_understands_every_option():
    command = ssh_command(connection("jump:you@bastion:2200"), HOST, KEY, KNOWN)
    done = subprocess.run(["ssh", "-G", *command[1:]], capture_output=True, text=True, check=True)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert (said["hostname"], said["port"], said["user"]) == ("10.0.0.3", "2222", "me")
    assert said["userknownhostsfile"] == str(KNOWN)
    assert said["stricthostkeychecking"] == "true"
    assert said["hostkeyalias"] == "r-1-w1"


def test_the_newest_slice_is_the_last_that_was_ready_and_lives():
    def event(kind: str, name: str) -> RunEvent:
        return RunEvent(0.0, kind, {"slice": name})

    told = [event("slice-intended", "a"), event("slice-ready", "a")]
    assert newest_slice(told[:1]) is None
    assert newest_slice(told) == "a"
    told += [event("slice-deleted", "a"), event("slice-intended", "b")]
    assert newest_slice(told) is None
    assert newest_slice([*told, event("slice-ready", "b"), event("slice-deleted", "a")]) == "b"
    told += [event("slice-leased", "c")]
    assert newest_slice(told) == "c"
    assert newest_slice([*told, event("slice-released", "c")]) is None


@pytest.fixture
async def running(track: Track) -> AsyncIterator[Track]:
    """The run `runs` trains on two hosts; it ends with the test."""
    run = track.numpy_run("runs", steps=10**6, every=10**5, step_s=0.05, slice={"accelerator_type": "v4-16"})
    async with track.driving(run) as driver:
        try:
            await driver.provision()
            await driver.sync()
            await driver.start_attempt()
            await until(lambda: (driver.view and driver.view.step) or 0, "the first step")
            yield track
        finally:
            await driver.clean_up("the test is done with it")
    track.assert_nothing_left()


async def relay(*words: str) -> Answer:
    return await asyncio.to_thread(relay_process, *words)


@needs_openssh
async def test_ssh_runs_a_command_on_the_host_that_was_named(running: Track, tmp_path: Path):
    connection = Connection.from_environment(running.emulator.env)
    hosts = await hosts_of(connection, running.directory("runs"))
    answers = await asyncio.gather(
        relay("ssh", "runs", "--", "echo $HOME; exit 7"),
        relay("ssh", "runs", "--host", "1", "--", "echo", "$TPU_EMULATOR_HOST"),
        relay("ssh", "runs", "--host", "2"),
        relay("logs", "runs", "--host", "1"),
    )
    assert answers[0].code == 7
    assert answers[0].err == ""
    assert answers[1].code == 0
    assert answers[1].out == f"{hosts[1].slice}-1\n"
    assert answers[2].sentence == f"there is no host 2: {hosts[0].slice} has 2 hosts, 0 to 1"
    assert answers[2].code == 2


@needs_openssh
async def test_ssh_refuses_a_host_that_shows_another_key(running: Track):
    connection = Connection.from_environment(running.emulator.env)
    command = await login_command(connection, running.directory("runs"), 0, ["echo", "in"])
    other = await login_command(connection, running.directory("runs"), 1, [])
    pinned = Path((option(command, "UserKnownHostsFile") or "").strip('"'))
    wrong = Path((option(other, "UserKnownHostsFile") or "").strip('"')).read_text().split(" ", 1)[1]

    async def log_in() -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        return process.returncode, out

    assert await log_in() == (0, b"in\n")
    pinned.write_text(f"{pinned.read_text().split(' ', 1)[0]} {wrong}")
    assert (await log_in())[0] == 255


async def test_a_slice_that_was_preempted_is_not_there_to_enter(running: Track):
    (node,) = running.emulator.nodes()
    await asyncio.to_thread(running.emulator.preempt, node["node"])
    connection = Connection.from_environment(running.emulator.env)
    with pytest.raises(HostNotReady):
        await hosts_of(connection, running.directory("runs"))


async def test_following_a_log_shows_lines_as_they_come_until_the_run_ends(track: Track):
    run = track.numpy_run("told", steps=40, step_s=0.05)
    async with track.driving(run) as driver:
        await driver.provision()
        await driver.sync()
        await driver.start_attempt()
        follower = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flows.command", "logs", "told", "--follow", stdout=asyncio.subprocess.PIPE
        )
        assert follower.stdout is not None
        async with asyncio.timeout(60):
            assert await follower.stdout.readline() == b"attempt 1 begins at step 0\n"
            await driver.wait_for_commit(40)
            assert await follower.stdout.readline() == b"attempt 1 finished step 40\n"
            assert follower.returncode is None
            await driver.clean_up("done")
    async with asyncio.timeout(30):
        assert await follower.stdout.read() == b""
        assert await follower.wait() == 0
