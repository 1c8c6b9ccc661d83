"""The database of a Prefect server: SQLite, a PostgreSQL of one's own in a folder, or one that exists, by its URL.

A PostgreSQL of one's own has neither a port nor a password: it listens on a socket, and asks the kernel who calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import create_async_engine

VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
# Where root keeps the data of a folder that nobody else may enter, such as one in /root.
ROOTS_PLACE = Path("/var/lib/tpu-relay")
START_S, STOP_S, ANSWER_S = 60, 30, 10.0


class DatabaseError(RuntimeError):
    """The database cannot be had; the message says why and what to do. It never has a password."""


def wanted_url(name: str) -> URL | None:
    """What `DB=name` means: None for one of our own (`postgres`), else the URL of one that exists.

    Raises:
        DatabaseError: it means nothing.
    """
    if name in ("postgres", "postgresql"):
        return None
    try:
        url = make_url(name)
    except ArgumentError:
        url = None
    if url is None or url.get_backend_name() not in ("postgres", "postgresql") or not (url.host or url.query):
        shown = name if "@" not in name else "a URL of another kind"
        raise DatabaseError(
            f"DB is `sqlite` (as without it), `postgres` for one of our own, or the URL of yours, such as "
            f"postgresql://USER@HOST/DATABASE; found {shown!r}"
        )
    return url.set(drivername="postgresql+asyncpg")


def shown(url: URL) -> str:
    """A URL for people: without its password."""
    return url.set(drivername="postgresql").difference_update_query(["password"]).render_as_string()


async def check_answers(url: URL) -> None:
    """Raises DatabaseError if the database does not let us in."""
    engine = create_async_engine(url, connect_args={"timeout": ANSWER_S})
    try:
        async with asyncio.timeout(2 * ANSWER_S), engine.connect() as connection:
            await connection.execute(text("select 1"))
    except Exception as error:  # of asyncpg, of the network, of SQLAlchemy
        why = str(getattr(error, "orig", None) or error) or type(error).__name__
        raise DatabaseError(f"the database {shown(url)} does not answer: {_without(url, why)}") from None
    finally:
        await engine.dispose()


def _without(url: URL, said: str) -> str:
    return said.replace(str(url.password), "***") if url.password else said


@dataclass(frozen=True)
class Postgres:
    """A PostgreSQL of one's own; its data stay in its folder when it is stopped."""

    home: Path
    initdb: Path
    pg_ctl: Path
    runs_as: pwd.struct_passwd | None

    @classmethod
    def of(cls, folder: Path) -> Postgres:
        """The one whose place is `folder`, started or not.

        Raises:
            DatabaseError: this machine has no PostgreSQL.
        """
        user = _lesser_user() if os.getuid() == 0 else None
        return cls(_home(folder.absolute(), user), _program("initdb"), _program("pg_ctl"), user)

    @property
    def data(self) -> Path:
        return self.home / "data"

    def pid(self) -> int | None:
        """Its process, if that lives: a later process of the same number has another folder."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(self._pid_file()[0])
            if Path(f"/proc/{pid}/cwd").readlink() == self.data.resolve():
                return pid
        return None

    def start(self) -> str:
        """Start it if it does not run, with its data made the first time; the URL under which it is found.

        Raises:
            DatabaseError: it does not start; the message has what it said.
        """
        if self.pid() is None:
            self._make_data()
            self._forget_the_killed()
            socket = Path(tempfile.mkdtemp(prefix="relay-pg-"))  # short: a path to a socket has 107 bytes
            self._give(socket)
            log = self.home / "postgres.log"
            try:
                self._call(
                    self.pg_ctl, "start", "-D", self.data, "-l", log, "-w", "-t", str(START_S),
                    "-o", f"-k {socket} -h ''",
                )  # fmt: skip
            except BaseException:
                shutil.rmtree(socket, ignore_errors=True)
                raise
        socket = self._pid_file()[4]
        return f"postgresql+asyncpg://{quote(_caller())}@/postgres?host={quote(socket, safe='/')}"

    def stop(self) -> bool:
        """End it, and whatever it is doing; whether it lived."""
        lived = self.pid() is not None
        if lived:
            socket = self._pid_file()[4]
            # Fast: whoever is connected is cut off. Its log is written ahead, so nothing is lost either way.
            stop = ("stop", "-D", self.data, "-w", "-t", str(STOP_S), "-m")
            try:
                self._call(self.pg_ctl, *stop, "fast")
            except DatabaseError:
                self._call(self.pg_ctl, *stop, "immediate")
            _remove_socket(socket)
        else:
            self._forget_the_killed()
        return lived

    def _pid_file(self) -> list[str]:
        return (self.data / "postmaster.pid").read_text().splitlines()

    def _forget_the_killed(self) -> None:
        """Of one that was killed, the folder of its socket is still there, and a file with its process.

        PostgreSQL itself would take a process that nobody has waited for as alive.
        """
        deadline = time.monotonic() + STOP_S
        while self._at_work() and time.monotonic() < deadline:
            time.sleep(0.1)  # its children see that it is gone, and leave
        if self._at_work():
            return
        with contextlib.suppress(OSError, IndexError):
            _remove_socket(self._pid_file()[4])
            (self.data / "postmaster.pid").unlink()

    def _at_work(self) -> bool:
        """Whether a process of it lives: each has the folder of its data as its own."""
        data = self.data.resolve()
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == data:
                    return True
        return False

    def _make_data(self) -> None:
        """All of it or nothing: whoever is interrupted here begins anew the next time."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._give(self.home)
        if self.data.exists():
            return
        part = self.home / "data.part"
        shutil.rmtree(part, ignore_errors=True)
        self._call(
            self.initdb, "-D", part, "--username", _caller(), "--auth-local", "peer",
            "--auth-host", "reject", "--encoding", "UTF8", "--locale", "C",
        )  # fmt: skip
        part.rename(self.data)

    def _give(self, folder: Path) -> None:
        if self.runs_as is not None:
            os.chown(folder, self.runs_as.pw_uid, self.runs_as.pw_gid)

    def _call(self, *command: str | Path) -> None:
        with tempfile.TemporaryFile() as output:  # no pipe: the server would keep it open
            done = subprocess.run(
                command, cwd="/", env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, **_as(self.runs_as),
            )  # fmt: skip
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if done.returncode != 0:
            log = self.home / "postgres.log"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:]) if log.exists() else ""
            raise DatabaseError(f"PostgreSQL: {Path(command[0]).name} failed:\n{said}\n{tail}".rstrip())


def _remove_socket(folder: str) -> None:
    if Path(folder).name.startswith("relay-pg-"):
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> Path:
    """A program of PostgreSQL; Debian keeps them out of the way."""
    if found := shutil.which(name):
        return Path(found)
    if versions := sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=_version):
        return versions[-1]
    raise DatabaseError(
        f"there is no {name} on this machine: install PostgreSQL (`apt install postgresql`), or give the URL of a "
        "database that you have, such as DB=postgresql://USER@HOST/DATABASE"
    )


def _version(program: Path) -> float:
    try:
        return float(program.parts[-3])
    except ValueError:
        return 0.0


def _lesser_user() -> pwd.struct_passwd:
    """Whom PostgreSQL runs as, which refuses to run as root."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise DatabaseError(
        "PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody`: make one, or work as another"
    )


def _home(folder: Path, user: pwd.struct_passwd | None) -> Path:
    """Where the data are: in `folder`, unless the user who is to own them cannot come there."""
    if user is None:
        return folder
    there = next(parent for parent in folder.parents if parent.exists())
    enters = subprocess.run(["test", "-x", there], check=False, cwd="/", **_as(user)).returncode == 0
    return folder if enters else ROOTS_PLACE / hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _caller() -> str:
    """Whom the kernel will name to PostgreSQL."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise DatabaseError(f"PostgreSQL wants a user with a name; {os.getuid()} has none here") from None


def _as(user: pwd.struct_passwd | None) -> dict[str, Any]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def own_postgres() -> Iterator[str]:
    """One for as long as a block lasts, of which nothing is left; gives its URL."""
    folder = Path(tempfile.mkdtemp(prefix="relay-pg-data-"))
    folder.chmod(0o711)
    made = Postgres.of(folder / "postgres")
    try:
        yield made.start()
    finally:
        made.stop()
        shutil.rmtree(folder)
