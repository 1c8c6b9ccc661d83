"""The database of `make up`: what DB means, a PostgreSQL of one's own, and refusals before anything is started."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from deployments.postgres import DatabaseError, Postgres, check_answers, shown, wanted_url
from deployments.prefect_server import free_port

ROOT = Path(__file__).parents[2]
SECRET = "open-sesame"


def has_postgres() -> bool:
    try:
        Postgres.of(Path("postgres"))
    except DatabaseError:
        return False
    return True


needs_postgres = pytest.mark.skipif(not has_postgres(), reason="no PostgreSQL on this machine")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("postgres", None),
        ("postgresql", None),
        (f"postgres://me:{SECRET}@db.example/prefect", "postgresql://me:***@db.example/prefect"),
        (f"postgresql://me:{SECRET}@db.example:5433/p", "postgresql://me:***@db.example:5433/p"),
        (
            f"postgresql+asyncpg://me:{SECRET}@db/prefect?ssl=require",
            "postgresql://me:***@db/prefect?ssl=require",
        ),
        (
            f"postgresql://me@/prefect?host=/run/postgresql&password={SECRET}",
            "postgresql://me@/prefect?host=%2Frun%2Fpostgresql",
        ),
    ],
)
def test_what_DB_means(name: str, expected: str | None):
    url = wanted_url(name)
    assert (url and shown(url)) == expected
    if url is not None:
        assert url.drivername == "postgresql+asyncpg"


@pytest.mark.parametrize(
    "name",
    ["postgre", "mysql://me:{}@db/prefect", "postgres:///", "postgresql+psycopg2", "{}@db", "sqlite:///x"],
)
def test_what_means_nothing_is_refused_with_what_would_and_never_with_a_password(name: str):
    with pytest.raises(DatabaseError, match="DB is `sqlite`") as refused:
        wanted_url(name.format(SECRET))
    assert SECRET not in str(refused.value)


async def test_a_database_that_does_not_answer_is_named_without_its_password():
    url = make_url(f"postgresql+asyncpg://me:{SECRET}@127.0.0.1:{free_port()}/prefect")
    with pytest.raises(DatabaseError, match=r"postgresql://me:\*\*\*@127\.0\.0\.1") as refused:
        await check_answers(url)
    assert SECRET not in str(refused.value)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="relay-test-"))
    folder.chmod(0o711)  # as root it belongs to another user, who is to come in
    made = Postgres.of(folder / "postgres")
    yield made
    made.stop()
    shutil.rmtree(folder)


def until_gone(postgres: Postgres) -> None:
    while postgres.pid() is not None:
        time.sleep(0.05)  # polling another process


async def asked(url: str, question: str) -> object:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return await connection.fetchval(question)
    finally:
        await connection.close()


@needs_postgres
async def test_a_postgres_of_ones_own_keeps_its_data_and_leaves_nothing_that_runs(postgres: Postgres):
    url = await asyncio.to_thread(postgres.start)
    socket = Path(make_url(url).query["host"])  # type: ignore[arg-type]
    assert make_url(url).password is None
    await check_answers(make_url(url))
    await asked(url, "create table kept as select 7 as seven")
    assert await asyncio.to_thread(postgres.start) == url, "started a second time it is the same one"
    assert (postgres.data / "postmaster.pid").stat().st_uid != 0
    assert await asked(url, "show listen_addresses") == "", "it has no port"

    pid = postgres.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(until_gone, postgres)
    again = await asyncio.to_thread(postgres.start)
    assert await asked(again, "select seven from kept") == 7
    assert not socket.exists(), "of the one that was killed nothing is left"

    assert await asyncio.to_thread(postgres.stop)
    assert postgres.pid() is None
    assert not Path(make_url(again).query["host"]).exists()  # type: ignore[arg-type]
    assert not await asyncio.to_thread(postgres.stop)


@needs_postgres
async def test_an_initdb_that_was_interrupted_begins_anew(postgres: Postgres):
    (postgres.home / "data.part/base").mkdir(parents=True)
    url = await asyncio.to_thread(postgres.start)
    assert await asked(url, "select 1") == 1


def refused(folder: Path, cwd: Path = ROOT, **variables: str) -> str:
    """What `make up` says that does not start anything."""
    ours = ("PREFECT_", "TPU_RELAY_", "TPU_EMULATOR_", "STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "deployments.local", "up", "--folder", folder], cwd=cwd, text=True, check=False,
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "starting" not in done.stdout
    assert SECRET not in done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path: Path):
    assert "DB is `sqlite`" in refused(tmp_path, DB="oracle")
    away = f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/prefect"
    assert "does not answer" in refused(tmp_path, DB=away)
    assert "unset one" in refused(tmp_path, DB="postgres", PREFECT_API_URL="http://127.0.0.1:1/api")
    outside = tmp_path / "tarball"
    outside.mkdir()
    assert "clone the repository with git" in refused(tmp_path, outside)
