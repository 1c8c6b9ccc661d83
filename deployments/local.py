"""`make up`, `make down`, `make status`: all that runs from the Prefect UI need, in the background on this machine.

A Prefect server, an emulated Cloud TPU and a worker. Where PREFECT_API_URL leads to a server (or Prefect Cloud) or
TPU_RELAY_PROJECT to a project, these are used, and none is started in their place. DB says where the server keeps its
records: in SQLite, in a PostgreSQL that is started too (`postgres`), or in one that exists, by its URL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deployments.background import Background
from deployments.deploy import POOL, delete_former, deploy_flows, make_work_pool
from deployments.postgres import VARIABLE, DatabaseError, Postgres, check_answers, shown, wanted_url
from deployments.prefect_server import free_port, settings, wait_until_healthy
from tpu.emulator.emulator import (
    EmulatorRecord,
    read_record,
    start_process,
    wait_until_gone,
    wait_until_ready,
)
from tpu.worker.processes import end_processes, flow_processes
from tpu.worker.where import worker_folder

FOLDER = Path(".relay")
PREFECT_PORT = 4200
STOP_S, CANCEL_S, WORKER_START_S = 20.0, 90.0, 90.0
# What a make hands on to all that it starts: how it was called, so the URL of a database with its password.
OF_MAKE = ("DB", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
# For the server alone: a flow has no business with its database.
OF_THE_SERVER = (VARIABLE, "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_PASSWORD",
                 "PREFECT_API_DATABASE_PASSWORD")  # fmt: skip


class NotUp(RuntimeError):
    """Something did not start; the message has the end of its log."""


class NotDown(RuntimeError):
    """Something did not end; the message says what."""


class Local:
    """What runs in the background, by the files of one folder."""

    def __init__(self, folder: Path, given: Mapping[str, str]) -> None:
        self.emulator_folder = (folder / "emulator").absolute()
        self.prefect_home = (folder / "prefect").absolute()
        background = (folder / "background").absolute()
        self.server, self.worker = Background(background, "server"), Background(background, "worker")
        self._address, self._database = background / "address", background / "database"
        self._started_with = background / "started-with.json"
        self._lock, self._postgres_folder = background / "lock", (folder / "postgres").absolute()
        self._wanted = given.get("DB", "")
        self._for_server = {name: given[name] for name in OF_THE_SERVER if name in given}
        self._given = {name: value for name, value in given.items() if name not in (*OF_MAKE, *OF_THE_SERVER)}
        # A terminal that was told where ours are has them in its variables; these outlive `make down`.
        self.own_server = not given.get("PREFECT_API_URL") or given.get("PREFECT_HOME") == str(
            self.prefect_home
        )
        record = self.emulator()
        named = given.get("TPU_RELAY_PROJECT") or given.get("GOOGLE_CLOUD_PROJECT")
        self.own_cloud = not named or (record is not None and given.get("TPU_RELAY_API_KEY") == record.key)

    def emulator(self) -> EmulatorRecord | None:
        return read_record(self.emulator_folder)

    def api_url(self) -> str | None:
        """Where the Prefect API is, if its server runs."""
        if not self.own_server:
            return self._given["PREFECT_API_URL"]
        return self._address.read_text() if self.server.pid() is not None else None

    def environment(self) -> dict[str, str]:
        """The variables under which all of it is found."""
        found = dict(self._given)
        if self.own_server:
            found |= settings(self.prefect_home)
        if url := self.api_url():
            found["PREFECT_API_URL"] = url
        if self.own_cloud and (record := self.emulator()) is not None:
            found |= record.env
        return found

    def postgres(self) -> Postgres | None:
        """The PostgreSQL of `DB=postgres`, whether it runs or not; None on a machine that has none."""
        try:
            return Postgres.of(self._postgres_folder)
        except DatabaseError:
            return None

    def up(self, notify: Sequence[str] = ()) -> None:
        """Start what does not run yet, and deploy all flows and automations; messages go by the blocks `notify`.

        Raises:
            NotUp: one of them does not start, or what is asked for cannot be; in that case nothing is started.
            DatabaseError: the database that DB names cannot be had.
        """
        with self._alone():
            self._check()
            if self.own_cloud and self.emulator() is None:
                self._start_emulator()
            if self.own_server:
                self._start_server()
            say("deploying the flows of deployments/prefect.yaml")
            os.environ.update(self.environment())
            asyncio.run(make_work_pool())
            deploy_flows(self.environment())
            asyncio.run(delete_former())
            _make_automations(notify)
            if self.worker.pid() is None:
                self._start_worker()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No second `make up` or `make down` at the same time."""
        self._lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NotUp("another `make up` or `make down` is at work here; wait for it") from None
            yield

    def _check(self) -> None:
        """Refuse what cannot be, before anything is started."""
        check_commit()
        if self._wanted and not self.own_server:
            raise NotUp(
                "DB is for the server that is started here, but PREFECT_API_URL leads to one: unset one"
            )
        if not self.own_server:
            _check_answers(self._given["PREFECT_API_URL"], "PREFECT_API_URL")
        if not self.own_cloud and (emulated := self._given.get("TPU_RELAY_REST_ENDPOINT")):
            _check_answers(emulated, "TPU_RELAY_*")
        if self._wanted not in ("", "sqlite"):
            url = wanted_url(self._wanted)
            if url is None:
                Postgres.of(self._postgres_folder)
            else:
                asyncio.run(check_answers(url))
        if self.server.pid() is not None and self._wanted and self._wanted_database() != self.database():
            raise NotUp(f"the server that runs has its records in {self.database()}: `make down` first")
        if self.worker.pid() is not None and self.own_cloud and self.emulator() is None:
            raise NotUp(
                "the emulated Cloud TPU has ended, and with it all that it had: `make down`, then `make up`"
            )

    def _start_emulator(self) -> None:
        say("starting the emulated Cloud TPU")
        process = start_process(self.emulator_folder, [], subprocess.DEVNULL)
        try:
            wait_until_ready(process, self.emulator_folder)
        except BaseException:
            process.terminate()  # nobody would find it again
            process.wait()
            raise

    def _start_worker(self) -> None:
        say("starting the worker")
        flows = worker_folder(POOL, self.environment()).absolute()
        self._started_with.write_text(json.dumps({"flows": str(flows), "emulated": self.own_cloud}))
        process = self.worker.start(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"worker-{POOL}"],
            self.environment() | {"PREFECT_WORKER_QUERY_SECONDS": "5", "PYTHONUNBUFFERED": "1"},
        )
        deadline = time.monotonic() + WORKER_START_S
        while "started!" not in self.worker.tail():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotUp(f"the worker does not start; its log ends:\n{self.worker.tail()}")
            time.sleep(0.2)  # polling another process

    def database(self) -> str:
        """Where the server keeps its records, for people."""
        try:
            return self._database.read_text()
        except FileNotFoundError:
            return self._wanted_database()

    def _wanted_database(self) -> str:
        if self._wanted in ("", "sqlite"):
            return "SQLite"
        url = wanted_url(self._wanted)
        return "PostgreSQL" if url is None else shown(url)

    def _start_server(self) -> None:
        lives = self.server.pid() is not None
        if lives and (self.database() != "PostgreSQL" or ((own := self.postgres()) and own.pid())):
            self._await_server()  # an earlier `make up` may not have waited for it
            return
        if lives:
            say("its PostgreSQL has ended: the Prefect server is started again")
            self.server.stop(STOP_S)
        database = self._for_server
        if not self._wanted and self._database.exists() and self.worker.pid() is not None:
            wanted = self._database.read_text()  # a worker is there that knows a server with other records
            if wanted != self._wanted_database():
                raise NotUp(
                    f"the server had its records in {wanted}: start it with the same DB, or `make down` first"
                )
        if self._wanted not in ("", "sqlite"):
            url = wanted_url(self._wanted)
            if url is None:
                say("starting PostgreSQL")
                database = {VARIABLE: Postgres.of(self._postgres_folder).start()}
            else:
                database = {VARIABLE: url.render_as_string(hide_password=False)}
        say("starting the Prefect server")
        before = self._address.read_text() if self._address.exists() else ""
        port = int(before.removesuffix("/api").rpartition(":")[2] or PREFECT_PORT)
        if free_port(port) != port:
            if self.worker.pid() is not None:
                raise NotUp(
                    f"port {port}, where the worker looks for the server, is taken: free it, or `make down`"
                )
            port = free_port(PREFECT_PORT)
        self.prefect_home.mkdir(parents=True, exist_ok=True)
        self.server.start(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            self._given | settings(self.prefect_home) | database,
        )
        self._address.write_text(f"http://127.0.0.1:{port}/api")
        self._database.write_text(self._wanted_database())
        self._await_server()

    def _await_server(self) -> None:
        wait_until_healthy(
            lambda: self.server.pid() is not None,
            self._address.read_text(),
            self.prefect_home,
            self.server.log,
        )

    def down(self) -> None:
        """End all of it: runs first, in order, so that no slice of a real project is left.

        Raises:
            NotDown: something clings to life; all else is ended.
        """
        with self._alone():
            stopped, trouble = list[str](), list[str]()

            def end(name: str, stop: Callable[[], bool]) -> None:
                try:
                    if stop():
                        stopped.append(name)
                except Exception as error:  # the others are to be ended all the same
                    trouble.append(f"{name}: {error}")

            end("flow runs", self._end_flows)
            end("worker", lambda: self.worker.stop(STOP_S))
            end("server", lambda: self.server.stop(STOP_S))
            if (own := self.postgres()) is not None:
                end("PostgreSQL", own.stop)
            end("emulator", self._stop_emulator)
            say(f"stopped: {', '.join(stopped)}" if stopped else "nothing runs here")
            if trouble:
                raise NotDown("; ".join(trouble))
            for file in (self._address, self._database, self._started_with):
                file.unlink(missing_ok=True)

    def _stop_emulator(self) -> bool:
        if (record := self.emulator()) is None:
            return False
        os.kill(record.pid, signal.SIGTERM)
        wait_until_gone(record, self.emulator_folder)
        return True

    def flows(self) -> list[str]:
        """Ids of the flow runs that our worker is not done with: their processes live, or what they left does."""
        return sorted(path.parent.name for path in self._worker_folder().glob("*/record.json"))

    def _worker_folder(self) -> Path:
        """As it was when the worker was started, whatever has died or is not said any more since."""
        known = self._known()
        return Path(known["flows"]) if known else worker_folder(POOL, self.environment())

    def _known(self) -> dict[str, Any]:
        """What the worker was started with; empty if none was."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads(self._started_with.read_text())
        return {}

    def _end_flows(self) -> bool:
        """Let flow runs save and delete their slices, as long as that is any use; whether there were any."""
        flows = self.flows()
        if not flows:
            return False
        watched, deadline = self.worker.pid() is not None, time.monotonic() + CANCEL_S
        if self._known().get("emulated") and self.emulator() is None:
            deadline = time.monotonic()  # with its cloud all that they could save or delete is gone
        else:
            say(f"cancelling {len(flows)} flow run(s), which save and delete their slices")
            if not (self.api_url() and self._cancelled(flows)):
                for flow in flows:  # nobody tells them through the server
                    end_processes(flow, signal.SIGTERM)
        while self._unfinished(watched) and time.monotonic() < deadline:
            time.sleep(0.5)  # polling other processes: there is nothing to be told by
        for left in self._unfinished(watched):
            say(f"flow run {left} did not end and is killed; `relay reap` deletes what it may have left")
            end_processes(left, signal.SIGKILL)
        for left in self.flows():
            shutil.rmtree(self._worker_folder() / left, ignore_errors=True)
        return True

    def _unfinished(self, watched: bool) -> list[str]:
        """Without a worker, a flow run is done with when its processes are gone."""
        living = flow_processes()
        return [flow for flow in self.flows() if watched or flow in living]

    def _cancelled(self, flows: list[str]) -> bool:
        os.environ.update(self.environment())
        try:
            asyncio.run(_cancel(flows))
        except Exception as error:  # whatever a dying server makes of it: flows are then told by a signal
            say(f"the Prefect server does not take it: {error}")
            return False
        return True

    def status(self) -> list[str]:
        """What runs and where, in a line each, and the slices with what they cost."""
        url, record = self.api_url(), self.emulator()
        lines = [
            f"server    {_ui(url)}" + ("" if self.own_server else " (yours)") if url else "server    –",
            *self._database_lines(url),
            f"cloud     {self._cloud(record)}",
            f"worker    process {pid}, pool {POOL}, log {_shown(self.worker.log)}"
            if (pid := self.worker.pid()) else "worker    –",
            f"flow runs {len(self.flows())} at work",
        ]  # fmt: skip
        if record is not None or not self.own_cloud:
            os.environ.update(self.environment())
            try:
                lines += slice_lines()
            except Exception as error:  # whatever it is, the rest is to be told
                lines.append(f"slices    not known: {str(error) or type(error).__name__}")
        if url and self.own_server:
            lines.append(f"for a terminal: export PREFECT_API_URL={url} PREFECT_HOME={self.prefect_home}")
        return lines

    def _database_lines(self, url: str | None) -> list[str]:
        own = self.postgres()
        if own is not None and (pid := own.pid()):
            return [f"database  PostgreSQL, process {pid}, in {_shown(own.home)}"]
        if not (url and self.own_server):
            return []
        gone = (
            ", which has ended: `make up DB=postgres` starts it again"
            if self.database() == "PostgreSQL"
            else ""
        )
        return [f"database  {self.database()}{gone}"]

    def _cloud(self, record: EmulatorRecord | None) -> str:
        if not self.own_cloud:
            return f"project {self._given.get('TPU_RELAY_PROJECT') or self._given['GOOGLE_CLOUD_PROJECT']} (yours)"
        return f"emulated, process {record.pid}; its variables: python -m tpu.emulator env" if record else "–"


async def _cancel(flow_run_ids: list[str]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelling

    async with get_client() as client:
        for key in flow_run_ids:
            with contextlib.suppress(ObjectNotFound):
                await client.set_flow_run_state(key, Cancelling(message="make down"))  # type: ignore[arg-type]


def slice_lines() -> list[str]:
    """The slices that leases know, with who has them and what they cost an hour."""
    from tpu.checkpoint import objects
    from tpu.connection import Connection
    from tpu.slices.lease_book import GcsLeaseBook
    from tpu.slices.pool_showing import pool_lines

    async def look() -> list[str]:
        bucket = Connection.from_environment().bucket
        book, lines = GcsLeaseBook(bucket), list[str]()
        for pool in await asyncio.to_thread(objects.folders, f"{bucket}/pools"):
            leases = [one.lease for one in await book.list(pool, past=False)]
            lines += pool_lines(pool, await book.settings(pool), leases, time.time())
        return lines

    return asyncio.run(look())


def check_commit() -> None:
    """Behind a form there is no working tree: runs train with a commit, so there must be one.

    Raises:
        NotUp: there is none.
    """
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        said = head.stderr.strip().splitlines()[-1:] if head.returncode else []
    except FileNotFoundError:
        said = ["there is no git on this machine"]
    if said:
        raise NotUp(
            "deployed runs train with the code of a commit, and this folder has none: clone the repository with git, "
            f"or `git init && git add --all && git commit -m first` here ({said[0]})"
        )
    if subprocess.run(["git", "status", "--porcelain"], capture_output=True, check=False).stdout:
        say("note: changes that are not committed are not in what is deployed; commit, then `make up` again")


def _check_answers(url: str, variables: str) -> None:
    """Raises NotUp if nobody listens at an address that the terminal's variables name."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=10).close()
    except OSError as error:
        raise NotUp(
            f"nothing answers at {url} ({error}): unset {variables} to have one of your own started here"
        ) from None


def _ui(api_url: str) -> str:
    return f"UI at {api_url.removesuffix('/api')}"


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _make_automations(notify: Sequence[str]) -> None:
    from deployments.automations import apply  # Prefect reads the environment when it is imported

    asyncio.run(apply(notify))


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.local", description=__doc__)
    parser.add_argument("do", choices=["up", "down", "status"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where it keeps its files ({FOLDER})")
    parser.add_argument("--notify", action="append", default=[], metavar="TYPE/NAME",
                        help="for up: messages by this block, as python -m deployments.automations")  # fmt: skip
    arguments = parser.parse_args()
    local = Local(arguments.folder, os.environ)
    for name in (*OF_MAKE, *OF_THE_SERVER):
        os.environ.pop(name, None)
    try:
        match arguments.do:
            case "up":
                local.up(arguments.notify)
                print("\n".join(local.status()))
            case "down":
                local.down()
            case "status":
                print("\n".join(local.status()))
    except KeyboardInterrupt:
        print("make: interrupted; `make status` shows what runs, `make down` ends it", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except RuntimeError as error:
        sys.exit(f"make: {error}")


if __name__ == "__main__":
    main()
