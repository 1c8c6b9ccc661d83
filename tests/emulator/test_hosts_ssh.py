"""What a client sees of an emulated host over SSH."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil

import asyncssh
import pytest

from tests.emulator.machines import USER, alive, key_line, pinned, room, until


async def test_a_command_runs_in_the_home_folder_with_its_exit_code_and_both_outputs(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            done = await client.run("pwd; echo trouble >&2; exit 7")
        assert done.stdout == f"{host.spec.home}\n"
        assert done.stderr == "trouble\n"
        assert done.exit_status == 7


async def test_only_keys_of_the_metadata_log_in_and_a_change_counts_at_once(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        other = asyncssh.generate_private_key("ssh-ed25519")
        with pytest.raises(asyncssh.PermissionDenied):
            await r.connect(host, other)
        with pytest.raises(asyncssh.PermissionDenied):
            await r.connect(host, user="somebody-else")

        broken = "relay:ssh-ed25519 not-a-key\nnot even a line\n"
        await host.set_attributes({"ssh-keys": broken + key_line(other)})

        async with r.connect(host, other) as client:
            assert (await client.run("echo $USER")).stdout == f"{USER}\n"
        with pytest.raises(asyncssh.PermissionDenied):
            await r.connect(host)


async def test_each_host_has_its_own_key_and_a_client_that_pins_another_is_warned(tmp_path):
    async with room(tmp_path) as r:
        first, second = await r.boot(), await r.boot(index=1)
        assert first.host_key_public.startswith("ssh-ed25519 AAAA")
        assert first.host_key_public != second.host_key_public
        with pytest.raises(asyncssh.HostKeyNotVerifiable):
            await asyncssh.connect(
                first.spec.address,
                first.spec.ssh_port,
                username=USER,
                client_keys=[r.key],
                known_hosts=pinned(first, second.host_key_public),
                config=None,
            )


async def test_50_mb_go_through_in_both_directions(tmp_path):
    size = 50_000_000
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            out = await client.run(f"head -c {size} /dev/zero", encoding=None)
            assert len(out.stdout) == size
            data = os.urandom(size)
            into = await client.run("sha256sum", input=data, encoding=None)
        assert into.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_signals_reach_the_whole_group_and_are_reported(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            process = await client.create_process("sleep 1000 & echo $!; wait")
            sleeper = int(await process.stdout.readline())
            process.send_signal("TERM")
            done = await process.wait()
            assert done.exit_signal is not None
            assert done.exit_signal[0] == "TERM"
            await until(lambda: not alive(sleeper), "the group's other process is dead")


async def test_a_command_outlives_its_connection(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            process = await client.create_process("echo $$; exec sleep 1000")
            pid = int(await process.stdout.readline())
        assert pid in host.processes()


async def test_a_client_that_leaves_in_the_middle_of_output_ends_the_writer(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            process = await client.create_process("echo $$; exec cat /dev/zero", encoding=None)
            pid = int(await process.stdout.readuntil(b"\n"))
            client.abort()
        await until(lambda: not alive(pid), "the writer got SIGPIPE")


async def test_a_channel_stays_open_while_a_background_process_holds_the_output(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            process = await client.create_process(
                "mkfifo door; (cat door >/dev/null; echo late) & echo early"
            )
            assert await process.stdout.readline() == "early\n"
            await client.run("echo > door")
            assert await process.stdout.readline() == "late\n"
            assert (await process.wait()).exit_status == 0


@pytest.mark.skipif(shutil.which("scp") is None, reason="OpenSSH is not installed here")
async def test_openssh_copies_files(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        key, known, local = tmp_path / "key", tmp_path / "known", tmp_path / "local"
        key.write_bytes(r.key.export_private_key())
        key.chmod(0o600)
        known.write_text(f"[{host.spec.address}]:{host.spec.ssh_port} {host.host_key_public}\n")
        local.write_bytes(os.urandom(1_000_000))
        options = ("-i", str(key), "-o", f"UserKnownHostsFile={known}", "-P", str(host.spec.ssh_port))
        there = f"{USER}@{host.spec.address}:there"
        for source, target in ((str(local), there), (there, str(tmp_path / "back"))):
            process = await asyncio.create_subprocess_exec("scp", "-F", "none", *options, source, target)
            assert await process.wait() == 0
        assert (host.spec.home / "there").read_bytes() == local.read_bytes()
        assert (tmp_path / "back").read_bytes() == local.read_bytes()


async def test_files_go_over_sftp_and_scp_below_the_home_folder(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        local = tmp_path / "local.bin"
        local.write_bytes(os.urandom(300_000))
        async with r.connect(host) as client:
            async with client.start_sftp_client() as sftp:
                await sftp.put(local, "by-sftp.bin")
                await sftp.put(local, "~/by-tilde.bin")
                await sftp.get("by-sftp.bin", tmp_path / "back.bin")
            await asyncssh.scp(local, (client, "by-scp.bin"))
        for name in ("by-sftp.bin", "by-tilde.bin", "by-scp.bin"):
            assert (host.spec.home / name).read_bytes() == local.read_bytes()
        assert (tmp_path / "back.bin").read_bytes() == local.read_bytes()


async def test_a_host_is_a_jump_host_to_its_neighbours_but_not_out_of_the_machine(tmp_path):
    async with room(tmp_path) as r:
        jump, target = await r.boot(), await r.boot(index=1)
        async with r.connect(jump) as first:
            async with asyncssh.connect(
                target.spec.address,
                target.spec.ssh_port,
                tunnel=first,
                username=USER,
                client_keys=[r.key],
                known_hosts=pinned(target, target.host_key_public),
                config=None,
            ) as second:
                assert (await second.run("echo $HOSTNAME")).stdout == "slice-a-w-1\n"
            with pytest.raises(asyncssh.ChannelOpenError):
                await first.open_connection("192.0.2.1", 22)


async def test_a_terminal_is_given_to_those_who_ask(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            done = await client.run(
                "test -t 0 && test -t 1 && stty size", term_type="xterm", term_size=(91, 33)
            )
            assert done.stdout.strip() == "33 91"
            shell = await client.create_process(term_type="xterm")
            shell.stdin.write("exit 4\n")
            assert (await shell.wait()).exit_status == 4


async def test_a_process_sees_its_host_and_nothing_of_the_emulators_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVATE_TOKEN", "do-not-show")
    async with room(tmp_path) as r:
        host = await r.boot(environment={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}, threads=1)
        async with r.connect(host) as client:
            lines = (await client.run("env")).stdout.splitlines()
            cores = (
                await client.run("nproc; python -I -S -c 'import os; print(os.sched_getaffinity(0))'")
            ).stdout
        seen = dict(line.split("=", 1) for line in lines)
        assert "PRIVATE_TOKEN" not in seen
        assert seen["HOME"] == str(host.spec.home)
        assert seen["TPU_EMULATOR_HOST"] == "slice-a-0"
        assert seen["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:1"
        assert seen["GCE_METADATA_HOST"] == f"{host.spec.address}:8081"
        assert seen["OMP_NUM_THREADS"] == "1"
        assert cores.split("\n")[:2] == ["1", str(set(host.spec.cpus))]


async def test_the_startup_script_runs_at_boot_as_a_process_of_its_own(tmp_path):
    async with room(tmp_path) as r:
        attributes = {
            "ssh-keys": key_line(r.key),
            "startup-script": "echo began; pwd > where; exec sleep 1000",
        }
        host = await r.boot(attributes=attributes)
        log = host.folder / "startup-script.log"
        where = host.spec.home / "where"
        await until(lambda: where.exists() and bool(where.read_text()), "the script has run")
        assert log.read_text() == "began\n"
        assert len(host.processes()) == 3  # the first process, the SSH server, the script


async def test_many_sessions_at_once_on_one_host(tmp_path):
    async with room(tmp_path) as r:
        host = await r.boot()
        async with r.connect(host) as client:
            done = await asyncio.gather(*(client.run(f"echo {number}") for number in range(40)))
        assert [result.stdout for result in done] == [f"{number}\n" for number in range(40)]
