"""`make up`, `make down`, `make status`: all that runs from the Prefect UI need, in the background on this machine.

A Prefect server, an emulated Cloud TPU and a worker. Where PREFECT_API_URL leads to a server (or Prefect Cloud) or
TPU_RELAY_PROJECT to a project, these are used, and none is started in their place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from deployments.background import Background
from deployments.deploy import POOL, deploy_flows, make_work_pool
from deployments.prefect_server import free_port, settings, wait_until_healthy
from tpu.emulator.emulator import (
    EmulatorRecord,
    read_record,
    start_process,
    wait_until_gone,
    wait_until_ready,
)
from tpu.worker.processes import end_processes
from tpu.worker.where import worker_folder

FOLDER = Path(".relay")
PREFECT_PORT = 4200
STOP_S, CANCEL_S, WORKER_START_S = 20.0, 90.0, 90.0


class NotUp(RuntimeError):
    """Something did not start; the message has the end of its log."""


class Local:
    """What runs in the background, by the files of one folder."""

    def __init__(self, folder: Path, given: Mapping[str, str]) -> None:
        self.emulator_folder = (folder / "emulator").absolute()
        self.prefect_home = (folder / "prefect").absolute()
        background = (folder / "background").absolute()
        self.server, self.worker = Background(background, "server"), Background(background, "worker")
        self._address = background / "address"
        self._given = dict(given)
        self.own_server = not given.get("PREFECT_API_URL")
        self.own_cloud = not (given.get("TPU_RELAY_PROJECT") or given.get("GOOGLE_CLOUD_PROJECT"))

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

    def up(self) -> None:
        """Start what does not run yet, and deploy all flows.

        Raises:
            NotUp: one of them does not start.
        """
        if self.worker.pid() is not None:
            raise NotUp("it is up already; `make status` shows what runs, `make down` stops it")
        if self.own_cloud and self.emulator() is None:
            say("starting the emulated Cloud TPU")
            wait_until_ready(
                start_process(self.emulator_folder, [], subprocess.DEVNULL), self.emulator_folder
            )
        if self.own_server and self.server.pid() is None:
            self._start_server()
        say("deploying the flows of deployments/prefect.yaml")
        os.environ.update(self.environment())
        asyncio.run(make_work_pool())
        deploy_flows(self.environment())
        say("starting the worker")
        process = self.worker.start(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", f"worker-{POOL}"],
            self.environment() | {"PREFECT_WORKER_QUERY_SECONDS": "5", "PYTHONUNBUFFERED": "1"},
        )
        deadline = time.monotonic() + WORKER_START_S
        while "started!" not in self.worker.tail():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotUp(f"the worker does not start; its log ends:\n{self.worker.tail()}")
            time.sleep(0.2)

    def _start_server(self) -> None:
        say("starting the Prefect server")
        port = free_port(PREFECT_PORT)
        self.prefect_home.mkdir(parents=True, exist_ok=True)
        process = self.server.start(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            self._given | settings(self.prefect_home),
        )
        self._address.write_text(f"http://127.0.0.1:{port}/api")
        wait_until_healthy(process, f"http://127.0.0.1:{port}/api/health", self.server.log)

    def down(self) -> None:
        """End all of it: runs first, in order, so that no slice of a real project is left."""
        self._end_flows()
        stopped = [name for name in ("worker", "server") if getattr(self, name).stop(STOP_S)]
        if (record := self.emulator()) is not None:
            os.kill(record.pid, signal.SIGTERM)
            wait_until_gone(record, self.emulator_folder)
            stopped.append("emulator")
        say(f"stopped: {', '.join(stopped)}" if stopped else "nothing runs here")

    def flows(self) -> list[str]:
        """Ids of the flow runs that our worker is not done with: their processes live, or what they left does."""
        return sorted(path.parent.name for path in self._worker_folder().glob("*/record.json"))

    def _worker_folder(self) -> Path:
        return worker_folder(POOL, self.environment())

    def _end_flows(self) -> None:
        flows = self.flows()
        if flows and self.api_url() and self.worker.pid() is not None:
            say(f"cancelling {len(flows)} flow run(s), which save and delete their slices")
            os.environ.update(self.environment())
            asyncio.run(_cancel(flows))
            deadline = time.monotonic() + CANCEL_S
            while self.flows() and time.monotonic() < deadline:
                time.sleep(0.5)
        for left in self.flows():
            say(f"flow run {left} did not end and is killed; `relay reap` deletes what it may have left")
            end_processes(left, signal.SIGKILL)
            shutil.rmtree(self._worker_folder() / left, ignore_errors=True)

    def status(self) -> list[str]:
        """What runs and where, in a line each, and the slices with what they cost."""
        url, record = self.api_url(), self.emulator()
        lines = [
            f"server    {_ui(url)}" + ("" if self.own_server else " (yours)") if url else "server    –",
            f"cloud     {self._cloud(record)}",
            f"worker    process {pid}, pool {POOL}, log {_shown(self.worker.log)}"
            if (pid := self.worker.pid()) else "worker    –",
            f"flow runs {len(self.flows())} at work",
        ]  # fmt: skip
        if record is not None or not self.own_cloud:
            os.environ.update(self.environment())
            lines += slice_lines()
        if url and self.own_server:
            lines.append(f"for a terminal: export PREFECT_API_URL={url} PREFECT_HOME={self.prefect_home}")
        return lines

    def _cloud(self, record: EmulatorRecord | None) -> str:
        if not self.own_cloud:
            return f"project {self._given.get('TPU_RELAY_PROJECT') or self._given['GOOGLE_CLOUD_PROJECT']} (yours)"
        return f"emulated, process {record.pid}; its variables: python -m tpu.emulator env" if record else "–"


async def _cancel(flow_run_ids: list[str]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    async with get_client() as client:
        for key in flow_run_ids:
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


def _ui(api_url: str) -> str:
    return f"UI at {api_url.removesuffix('/api')}"


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.local", description=__doc__)
    parser.add_argument("do", choices=["up", "down", "status"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where it keeps its files ({FOLDER})")
    arguments = parser.parse_args()
    local = Local(arguments.folder, os.environ)
    try:
        match arguments.do:
            case "up":
                local.up()
                print("\n".join(local.status()))
            case "down":
                local.down()
            case "status":
                print("\n".join(local.status()))
    except (NotUp, RuntimeError) as error:
        sys.exit(f"make: {error}")


if __name__ == "__main__":
    main()
