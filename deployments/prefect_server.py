"""A Prefect server of one's own, with its database in a folder, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from deployments.postgres import VARIABLE

# A busy machine takes minutes to import Prefect and to make the tables.
START_S = 300.0


def settings(folder: Path) -> dict[str, str]:
    """Variables for all that uses the server's folder; recording is batched, since a run makes bursts of records."""
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The UI asks whoever it came from; by default it asks port 4200, whatever port the server has.
        "PREFECT_SERVER_UI_API_URL": "/api",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
        # In memory, a restart of the server would crash whatever holds a place of a concurrency limit.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }


@contextlib.contextmanager
def prefect_server(
    folder: Path, port: int | None = None, database: str | None = None
) -> Iterator[dict[str, str]]:
    """Start a server and give the variables under which flows find it; ends it afterwards.

    Its records are in its folder, or in the PostgreSQL of the URL `database`.

    Raises:
        RuntimeError: it did not come up; the message names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    environment = settings(folder) | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    log = folder / "server.log"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [
                Path(sys.executable).parent / "prefect",
                "server",
                "start",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ],
            env=os.environ | environment | ({VARIABLE: database} if database else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_healthy(lambda: server.poll() is None, environment["PREFECT_API_URL"], folder, log)
        yield environment
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port(wanted: int = 0) -> int:
    """A port of the loopback that nobody listens on: `wanted` if it is free, else any."""
    with socket.socket() as listener:
        # Connections of a server that has ended linger for a minute; they are no listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", wanted))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_healthy(alive: Callable[[], bool], api_url: str, home: Path, log: Path) -> None:
    """Return when the server of this PREFECT_HOME answers; another one may have been quicker to take its port.

    Raises:
        RuntimeError: it did not come up; the message says why, and names its log.
    """
    deadline = time.monotonic() + START_S
    while alive() and time.monotonic() < deadline:
        if _home_of(api_url) == home.absolute():
            return
        time.sleep(0.2)  # polling another process: there is nothing to be told by
    if alive():
        raise RuntimeError(
            f"the Prefect server did not come up within {START_S:.0f} s; it may still, so try again. Its log: {log}"
        )
    said = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
    raise RuntimeError(
        f"the Prefect server ended at its start: {said[-1] if said else 'see its log'} ({log})"
    )


def _home_of(api_url: str) -> Path | None:
    """PREFECT_HOME of the server that answers here, if one does."""
    try:
        with urllib.request.urlopen(f"{api_url}/admin/settings", timeout=5) as answer:
            return Path(json.load(answer)["home"]).absolute()
    except (OSError, ValueError, KeyError, TypeError):
        return None
