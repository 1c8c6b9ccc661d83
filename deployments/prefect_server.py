"""A Prefect server of one's own, with its database in a folder, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from deployments.postgres import VARIABLE

START_S = 120.0


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
        wait_until_healthy(server, f"http://127.0.0.1:{port}/api/health", log)
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


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)  # polling another process: there is nothing to be told by
    raise RuntimeError(f"the Prefect server did not come up; its log: {log}")
