"""Code and environments on the hosts of an emulated slice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import files
from tpu.connection import Connection
from tpu.hosts.connect import connect_all
from tpu.hosts.group import HostGroup
from tpu.hosts.identity import ensure_identity
from tpu.runs.code import CodeError
from tpu.runs.driver import AttemptEnded, RunDriver
from tpu.runs.logs import log_parts
from tpu.runs.remote import hosts_of
from tpu.runs.sync import Installed


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    (folder / "say.py").write_text("import sys; print('I am', sys.prefix)\n")
    (folder / "tools/go.sh").write_text("#!/bin/sh\necho went\n")
    (folder / "tools/go.sh").chmod(0o755)
    (folder / "requirements.txt").write_text("# nothing: what is here must not need the network\n")
    (folder / "wrong.txt").write_text("./no-such-package\n")
    return folder


async def synced(track: Track, driver: RunDriver) -> tuple[Installed, Connection]:
    await driver.provision()
    return await driver.sync(), Connection.from_environment(track.emulator.env)


async def on_hosts(group: HostGroup, command: str) -> list[str]:
    done = await group.run(command)
    assert [one.exit_code for one in done] == [0] * len(done), done
    return [one.stdout for one in done]


async def test_every_host_gets_the_program_once(track: Track, project: Path):
    run = track.numpy_run(
        "code", command="python say.py", contract=False, slice={"accelerator_type": "v4-16"}
    )
    heard: list[str] = []
    async with track.driving(run, heard.append, project) as driver:
        try:
            installed, connection = await synced(track, driver)
            said = next(line for line in heard if line.startswith("sync: working tree project"))
            assert said.endswith("to 2 host(s)")
            hosts = await hosts_of(connection, track.directory("code"))
            identity = ensure_identity(connection.home)
            async with connect_all(hosts, identity, connection, 20, heard.append) as group:
                assert await on_hosts(group, f"{installed.folder}/tools/go.sh") == ["went\n"] * 2
                listed = await on_hosts(group, "ls ~/.relay/code")
                # The program and our own part, whole, and nothing half unpacked.
                assert [len(text.split()) for text in listed] == [2, 2]
                assert not [text for text in listed if ".part" in text]
        finally:
            await driver.clean_up("done")
    track.assert_nothing_left()


async def test_a_driver_that_takes_a_slice_up_sends_nothing_again(track: Track, project: Path):
    run = track.numpy_run("again", command="python say.py", contract=False)
    async with track.driving(run, folder=project) as driver:
        first, _ = await synced(track, driver)
    heard: list[str] = []
    async with track.driving(run, heard.append, project) as driver:
        try:
            second, _ = await synced(track, driver)
        finally:
            await driver.clean_up("done")
    assert second == first, heard
    assert not [line for line in heard if line.startswith("sync:")]


async def test_a_program_runs_in_the_environment_of_its_requirements(track: Track, project: Path):
    run = track.numpy_run(
        "env", command="python say.py", contract=False, environment={"requirements": "requirements.txt"}
    )
    async with track.driving(run, folder=project) as driver:
        try:
            installed, _ = await synced(track, driver)
            await driver.start_attempt()
            await driver.wait_for_commit(run.steps)
        finally:
            await driver.clean_up("done")
    assert "/.relay/envs/" in installed.python
    (part,) = log_parts(track.directory("env"), 1, 0)
    assert files.read(part).decode() == f"I am {installed.python.removesuffix('/bin/python')}\n"
    track.assert_nothing_left()


async def test_an_environment_that_cannot_be_built_is_the_users_failure_in_the_builders_words(
    track: Track, project: Path
):
    run = track.numpy_run(
        "wrong", command="python say.py", contract=False, environment={"requirements": "wrong.txt"}
    )
    async with track.driving(run, folder=project) as driver:
        try:
            await driver.provision()
            with pytest.raises(AttemptEnded, match=r"user failure: .*no-such-package") as ended:
                async with driver.preparing():
                    await driver.sync()
            assert ended.value.retry
        finally:
            await driver.clean_up("done")
    track.assert_nothing_left()


async def test_a_requirements_file_that_is_not_in_the_code(track: Track, project: Path):
    run = track.numpy_run(
        "none", command="python say.py", contract=False, environment={"requirements": "missing.txt"}
    )
    with pytest.raises(
        CodeError, match=r"requirements: there is no file missing\.txt in working tree project"
    ):
        async with track.driving(run, folder=project):
            pass
    assert files.names(track.directory("none")) == []  # nothing was made
