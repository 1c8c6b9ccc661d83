"""`make up DB=postgres`: a run through it, a stop, and the run is still known; and by the URL of a database."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.postgres import Postgres
from tests.deployments.test_local import CHANGES, completed, local
from tests.deployments.test_postgres import SECRET, needs_postgres
from tpu.runs.controller import process_start

pytestmark = [pytest.mark.slow, needs_postgres]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="relay-up-"))
    made.chmod(0o711)  # as root PostgreSQL belongs to another user, who is to come in
    try:
        yield made
    finally:
        local(made, "down")
        shutil.rmtree(made)


async def run_by_command(folder: Path) -> UUID:
    """A short run as a person starts it, once it is Completed."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "prefect", "deployment", "run", "train/icl", "--param", f"changes={CHANGES}"],
        env=os.environ | {"PREFECT_API_URL": (folder / "background/address").read_text()},
        text=True, check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    flow_run = UUID(re.findall(r"UUID: (\S+)", done.stdout)[0])
    with temporary_settings({PREFECT_API_URL: (folder / "background/address").read_text()}):
        await completed(flow_run)
    return flow_run


async def known(folder: Path, flow_run: UUID) -> bool:
    with temporary_settings({PREFECT_API_URL: (folder / "background/address").read_text()}):
        async with get_client() as client:
            state = (await client.read_flow_run(flow_run)).state
            return state is not None and state.is_completed()


async def test_a_run_on_postgres_is_known_after_a_stop_and_nothing_is_left(folder: Path):
    told = local(folder, "up", DB="postgres")
    pids = [int(pid) for pid in re.findall(r"process (\d+)", told)]
    assert len(pids) == 3, told
    flow_run = await run_by_command(folder)
    stopped = local(folder, "down")
    assert "PostgreSQL" in stopped
    assert [pid for pid in pids if process_start(pid)] == []
    assert "database" not in local(folder, "status")
    local(folder, "up", DB="postgres")
    assert await known(folder, flow_run)


def seen_by_others() -> str:
    """Command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


async def test_a_database_by_its_url_and_nobody_reads_its_password(folder: Path):
    postgres = Postgres.of(folder / "theirs")
    try:
        # It asks the kernel, so any password will do.
        url = postgres.start().replace("+asyncpg", "").replace("@", f":{SECRET}@")
        told = local(folder, "up", DB=url)
        assert "database  postgresql://" in told
        assert len(re.findall(r"process (\d+)", told)) == 2, (
            "a database that exists is not ours to show or to stop"
        )
        assert await known(folder, await run_by_command(folder))
        assert SECRET not in told + local(folder, "status") + seen_by_others()
        for log in [*folder.rglob("*.log"), folder / "background/database"]:
            assert SECRET not in log.read_text(errors="replace"), log
        worker = int(re.findall(r"worker +process (\d+)", told)[0])
        assert SECRET.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
        local(folder, "down")
        assert postgres.pid() is not None
    finally:
        local(folder, "down")
        postgres.stop()
