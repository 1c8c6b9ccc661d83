"""Connecting to emulated hosts: pinned keys, waiting, routes, commands, files, broken connections."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from pathlib import Path

import asyncssh
import pytest

from tests.hosts.conftest import Slice
from tpu.emulator.emulator import Emulator
from tpu.hosts.connect import HostKeyRefused, HostUnreachable, RouteError, connect_all
from tpu.hosts.errors import CommandFailed
from tpu.hosts.identity import ensure_identity

PROXY = """
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("a warning that is no part of the stream", file=sys.stderr, flush=True)
def pump():
    while data := link.recv(65536):
        os.write(1, data)
    os._exit(0)
threading.Thread(target=pump, daemon=True).start()
while data := os.read(0, 65536):
    link.sendall(data)
"""


async def test_a_command_runs_on_both_hosts(pair: Slice) -> None:
    async with pair.connect() as group:
        done = await group.run("echo $TPU_EMULATOR_HOST; cat; echo bad >&2; exit 3", stdin=b"input\n")
    assert [one.host.index for one in done] == [0, 1]
    assert [one.stdout for one in done] == ["pair-0\ninput\n", "pair-1\ninput\n"]
    assert {(one.exit_code, one.stderr) for one in done} == {(3, "bad\n")}


async def test_a_file_is_stored_as_a_whole_on_both_hosts(pair: Slice, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * 20_000)
    async with pair.connect() as group:
        await group.put(b"hello", "~/.relay/a/b.txt")
        await group.put(big, "big", mode=0o700)
        done = await group.run(
            "cat .relay/a/b.txt; stat -c ' %a' .relay/a/b.txt big; sha256sum < big; ls -A .relay/a"
        )
    assert len({one.stdout for one in done}) == 1
    assert done[0].stdout.splitlines()[:2] == ["hello 600", " 700"]
    assert done[0].stdout.splitlines()[-1] == "b.txt"


async def test_lines_come_while_the_command_runs(pair: Slice) -> None:
    async with pair.connect() as group:
        lines = group.members[1].stream("echo one; read -t 1000 < <(sleep 1000)")
        assert await anext(lines) == "one"
        await lines.aclose()
        assert [line async for line in group.members[1].stream("echo a; echo b >&2; printf c")] == [
            "a",
            "b",
            "c",
        ]
        with pytest.raises(CommandFailed, match="exit code 7"):
            _ = [line async for line in group.members[1].stream("exit 7")]


async def test_a_command_that_takes_too_long_is_given_up(pair: Slice) -> None:
    async with pair.connect() as group:
        with pytest.raises(HostUnreachable, match="no end within"):
            await group.run("sleep 1000", timeout_s=0.3)
        assert (await group.run("echo still here"))[0].stdout == "still here\n"


async def test_a_host_with_another_key_is_refused_at_once(pair: Slice) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
    hosts = (pair.hosts[0], dataclasses.replace(pair.hosts[1], host_key=other))
    begun = time.monotonic()
    with pytest.raises(HostKeyRefused, match="pair-w1: it shows another host key"):
        async with connect_all(hosts, pair.identity, pair.connection, 60, lambda _: None):
            pass
    assert time.monotonic() - begun < 10


async def test_a_host_without_a_published_key_is_refused_unless_allowed(pair: Slice) -> None:
    hosts = (dataclasses.replace(pair.hosts[0], host_key=None),)
    with pytest.raises(HostKeyRefused, match="published no host key"):
        async with connect_all(hosts, pair.identity, pair.connection, 60, lambda _: None):
            pass
    async with connect_all(
        hosts, pair.identity, pair.connection, 20, lambda _: None, allow_unpinned=True
    ) as group:
        assert (await group.run("echo in"))[0].stdout == "in\n"


async def test_V9_a_host_that_is_not_up_is_named_at_the_deadline(pair: Slice) -> None:
    await asyncio.to_thread(pair.emulator.kill_host, "pair", 1)
    begun = time.monotonic()
    with pytest.raises(HostUnreachable, match="pair-w1: Connection refused") as caught:
        async with pair.connect(1.5):
            pass
    assert list(caught.value.reasons) == ["pair-w1"]
    assert 1 < time.monotonic() - begun < 5


async def test_V9_ssh_that_comes_late_is_waited_for(pair: Slice) -> None:
    await asyncio.to_thread(pair.emulator.kill_ssh, "pair", 0)
    async with pair.connect() as group:
        assert len(await group.run("true")) == 2


async def test_a_key_that_is_not_the_nodes_gets_nowhere(pair: Slice, tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable, match=r"[Pp]ermission denied"):
        async with connect_all(pair.hosts, ensure_identity(tmp_path), pair.connection, 1.0, lambda _: None):
            pass


async def test_a_killed_ssh_server_is_known_at_once(pair: Slice) -> None:
    async with pair.connect() as group:
        waiting = asyncio.create_task(group.run("sleep 1000"))
        assert (await group.run("echo up"))[0].stdout == "up\n"
        begun = time.monotonic()
        await asyncio.to_thread(pair.emulator.kill_ssh, "pair", 0)
        waiting_for_one = asyncio.create_task(group.members[0].run("true"))
        with pytest.raises(HostUnreachable, match="pair-w0"):
            await waiting_for_one
        assert time.monotonic() - begun < 2
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_V14_through_a_proxy_command(pair: Slice, tmp_path: Path) -> None:
    script = tmp_path / "proxy.py"
    script.write_text(PROXY)
    route = f"{sys.executable} -I -S {script} %h %p"
    connection = dataclasses.replace(pair.connection, ssh_route=route)
    async with connect_all(pair.hosts, pair.identity, connection, 20, lambda _: None) as group:
        done = await group.run("echo $TPU_EMULATOR_HOST; head -c 3000000 /dev/zero | wc -c")
        assert [one.stdout.split() for one in done] == [["pair-0", "3000000"], ["pair-1", "3000000"]]


async def test_V14_a_proxy_that_fails_is_quoted(pair: Slice) -> None:
    route = "sh -c 'echo no such tunnel: %h >&2; exit 1'"
    connection = dataclasses.replace(pair.connection, ssh_route=route)
    with pytest.raises(HostUnreachable, match="no such tunnel: 127"):
        async with connect_all(pair.hosts, pair.identity, connection, 1.0, lambda _: None):
            pass


async def test_V14_through_a_jump_host_whose_key_is_known(pair: Slice, tmp_path: Path) -> None:
    first = pair.hosts[0]
    port = pair.connection.ssh_port
    route = f"jump:{pair.connection.ssh_user}@{first.internal}:{port}"
    connection = dataclasses.replace(pair.connection, ssh_route=route, home=tmp_path)
    with pytest.raises(RouteError, match="ssh-keyscan"):
        async with connect_all(pair.hosts, pair.identity, connection, 20, lambda _: None):
            pass
    known = tmp_path / "known_hosts"
    known.write_text(f"[{first.internal}]:{port} {first.host_key}\n")
    async with connect_all(pair.hosts, pair.identity, connection, 20, lambda _: None) as group:
        assert [one.stdout for one in await group.run("echo $TPU_EMULATOR_HOST")] == ["pair-0\n", "pair-1\n"]
    known.write_text(f"[{first.internal}]:{port} {pair.hosts[1].host_key}\n")
    with pytest.raises(HostKeyRefused, match="jump host"):
        async with connect_all(pair.hosts, pair.identity, connection, 20, lambda _: None):
            pass


async def test_who_is_waited_for_is_said(pair: Slice, emulator: Emulator) -> None:
    class FastClock:
        """A minute passes while a real one would take a tenth of a second."""

        def monotonic(self) -> float:
            return time.monotonic() * 100

        def time(self) -> float:
            return time.time()

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds / 100)

    await asyncio.to_thread(emulator.kill_host, "pair", 1)
    said: list[str] = []
    with pytest.raises(HostUnreachable):
        async with connect_all(
            pair.hosts, pair.identity, pair.connection, 60, said.append, clock=FastClock()
        ):
            pass
    assert said[-1] == "waiting for SSH of 1 of 2 host(s): pair-w1 (Connection refused)"
