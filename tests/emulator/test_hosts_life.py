"""Kill, hang, cut off, crash: what is left of a host, and what is not."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import asyncssh
import pytest

from tests.emulator.machines import alive, room, state, until
from tpu.emulator.host_pool import BootError, EmulatedHost
from tpu.emulator.processes import ProcessTable

# Leaves by a double fork into a session of its own, as a supervisor does; prints the pid that stays.
DETACH = """python -I -S -c '
import os, time
if os.fork(): os._exit(0)
os.setsid()
pid = os.fork()
if pid: print(pid, flush=True); os._exit(0)
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2): os.dup2(null, fd)
time.sleep(1000)
'"""

FORK_ON = "f() { sleep 0.01; setsid -f bash -c f; }; export -f f; f"


async def start_detached(room, host: EmulatedHost) -> int:
    async with room.connect(host) as client:
        return int((await client.run(DETACH, check=True)).stdout)


async def test_kill_takes_detached_processes_too_and_closes_every_port(tmp_path):
    async with room(tmp_path) as r:
        host, neighbour = await r.boot(), await r.boot(index=1)
        detached, other = await start_detached(r, host), await start_detached(r, neighbour)
        pids = host.processes()
        assert detached in pids
        assert other not in pids

        began = time.monotonic()
        await host.kill()
        took = time.monotonic() - began

        assert not any(alive(pid) for pid in pids)
        assert host.processes() == []
        assert not host.folder.exists()
        assert took < 1.0  # some 15 ms on an idle machine
        for port in (host.spec.ssh_port, host.spec.metadata_port):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host.spec.address, port)
        assert alive(other)


async def test_kill_takes_a_process_that_hides_its_environment_below_its_parent(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            bare = await client.create_process("env -i /bin/bash -c 'sleep 1000 & echo $!; wait'")
            pid = int(await bare.stdout.readline())
            await host.kill()
            assert not alive(pid)


async def test_kill_wins_against_a_program_that_keeps_forking(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            await client.run(f"({FORK_ON}) >/dev/null 2>&1 </dev/null")
            await host.kill()
        await asyncio.sleep(0.1)  # ten generations, were one left
        assert host.processes() == []


async def test_a_host_of_the_same_name_and_address_boots_again_with_another_key(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        await host.kill()
        again = await r.pool.boot(host.spec)
        assert again.host_key_public != host.host_key_public
        async with r.connect(again) as client:
            assert (await client.run("true")).exit_status == 0


async def test_a_hung_host_holds_its_connections_silently_and_resumes(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            ticking = await client.create_process("while sleep 0.05; do echo tick; done")
            assert await ticking.stdout.readline() == "tick\n"
            await host.hang()
            states = [state(pid) for pid in host.processes()]
            assert set(states) == {"T"}
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.run("true"), 0.5)
            await host.resume()
            await asyncio.wait_for(ticking.stdout.readline(), 10)
            assert (await asyncio.wait_for(client.run("echo back"), 10)).stdout == "back\n"


async def test_a_hung_host_can_be_killed(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        detached = await start_detached(r, host)
        await host.hang()
        await host.kill()
        assert not alive(detached)


async def test_kill_ssh_drops_connections_keeps_processes_and_the_same_server_comes_back(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        detached = await start_detached(r, host)
        async with r.connect(host) as client:
            foreground = await client.create_process("echo $$; exec sleep 1000")
            kept = int(await foreground.stdout.readline())
            await host.kill_ssh()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host.spec.address, host.spec.ssh_port)
            await asyncio.wait_for(client.wait_closed(), 5)
        assert alive(detached)
        assert alive(kept)

        async def admits_again() -> bool:
            try:
                async with r.connect(host) as client:  # the pinned key still holds
                    return (await client.run("true")).exit_status == 0
            except OSError:
                return False

        await until(admits_again, "the SSH server is back")
        assert {detached, kept} <= set(host.processes())
        await host.kill()
        assert not alive(detached)
        assert not alive(kept)


async def test_a_host_whose_first_process_is_killed_is_dead_as_a_whole(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        detached = await start_detached(r, host)
        first = min(host.processes())
        os.kill(first, signal.SIGKILL)
        await until(lambda: not alive(detached) and host.processes() == [], "all of it is dead")
        with pytest.raises((OSError, asyncssh.Error)):
            await r.connect(host)


async def test_hosts_outlive_the_forkserver_and_new_ones_boot(tmp_path):
    async with room(tmp_path) as r:
        before = await r.boot()
        os.kill(r.pool.forkserver_pid, signal.SIGKILL)
        after = await r.boot(index=1)
        for host in (before, after):
            async with r.connect(host) as client:
                assert (await client.run("true")).exit_status == 0
        detached = await start_detached(r, before)
        await before.kill()
        assert not alive(detached)


async def test_a_boot_that_the_dying_forkserver_took_along_is_done_again(tmp_path):
    async with room(tmp_path) as r:
        forkserver = r.pool.forkserver_pid
        assert forkserver is not None
        os.kill(forkserver, signal.SIGSTOP)  # the request waits in its queue …
        booting = asyncio.create_task(r.boot())
        await asyncio.wait({booting}, timeout=0.2)
        os.kill(forkserver, signal.SIGKILL)  # … and is lost
        async with r.connect(await asyncio.wait_for(booting, 20)) as client:
            assert (await client.run("true")).exit_status == 0


async def test_a_host_that_cannot_boot_says_why_and_leaves_nothing(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        with pytest.raises(BootError, match=r"slice-b-0.*(in use|EADDRINUSE)"):
            await r.boot(node="slice-b", address=host.spec.address, metadata_port=8082)
        with pytest.raises(BootError, match=r"slice-c-0.*Invalid argument"):
            await r.boot(node="slice-c", cpus=(100_000,))
        assert len(list((tmp_path / "state" / "machines").iterdir())) == 1


async def test_twenty_hosts_boot_at_once_and_die_with_the_pool_by_a_few_looks(tmp_path, monkeypatch):
    looks = 0

    def look(*_: object) -> ProcessTable:
        nonlocal looks
        looks += 1
        return read()

    async with room(tmp_path) as r:
        hosts = await asyncio.gather(*(r.boot(index=index) for index in range(20)))
        pids = [pid for host in hosts for pid in host.processes()]
        assert len(pids) == 40
        read = ProcessTable.read
        monkeypatch.setattr(ProcessTable, "read", look)
        await r.pool.stop()
        assert not any(alive(pid) for pid in pids)
    # Each look goes through all processes of the machine. One host alone needs half a dozen.
    assert looks < 2 * len(hosts), f"{looks} looks for {len(hosts)} hosts"
