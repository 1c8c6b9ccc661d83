"""A home folder in which the supervisor runs real processes, and a server that plays metadata and bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tpu.runtime import supervisor

SUPERVISOR = supervisor.__file__


def eventually(true: Callable[[], object], what: str, within_s: float = 15.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


class Home:
    """One emulated host: its home folder and the supervisor's commands on it."""

    def __init__(self, path: Path, python: str = sys.executable) -> None:
        self.path = path
        self.python = python
        self.environment = {
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "HOME": str(path),
            "GCE_METADATA_HOST": "127.0.0.1:1",
        }

    def folder(self, run: str = "r", attempt: int = 1) -> Path:
        return self.path / ".relay" / "runs" / run / str(attempt)

    def command(self, verb: str, folder: Path, *options: str) -> list[str]:
        return [self.python, "-I", "-S", SUPERVISOR, verb, str(folder), *options]

    def start(
        self, program: str | list[str], run: str = "r", attempt: int = 1, **spec: Any
    ) -> dict[str, Any]:
        """Start a shell script, or a command line; returns the supervisor's answer with its exit code."""
        argv = ["/bin/bash", "-c", program] if isinstance(program, str) else program
        text = json.dumps({"host": "slice-w0", "argv": argv, "metadata": "off", **spec})
        return self._ask("start", self.folder(run, attempt), stdin=text)

    def status(self, run: str = "r", attempt: int = 1) -> dict[str, Any]:
        return self._ask("status", self.folder(run, attempt))

    def end(self, run: str = "r", attempt: int = 1, grace_s: float = 0.0) -> dict[str, Any]:
        return self._ask("end", self.folder(run, attempt), "--grace", str(grace_s))

    def clear(self, term: int, *chips: int) -> dict[str, Any]:
        """Make chips free for the tenant whose lease has this term."""
        options = ("--term", str(term), "--chips", ",".join(map(str, chips)))
        return self._ask("clear", self.path / ".relay", *options)

    def follow(self, attempt: int = 1, log: int = 0, events: int = 0, run: str = "r") -> list[dict[str, Any]]:
        """Everything from the offsets on until the attempt's end."""
        options = ("--log-offset", str(log), "--event-offset", str(events))
        done = self._run(self.command("follow", self.folder(run, attempt), *options))
        return [json.loads(line) for line in done.stdout.splitlines()]

    def open_follower(self, attempt: int = 1) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("follow", self.folder("r", attempt)),
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def log(self, attempt: int = 1) -> str:
        path = self.folder("r", attempt) / "log"
        return path.read_text() if path.exists() else ""

    def pid(self, role: str, attempt: int = 1) -> int:
        folder = self.folder("r", attempt)
        if role == "child":
            return json.loads((folder / "child.json").read_text())["pid"]
        return json.loads((folder / "supervisor.json").read_text())[role]["pid"]

    def processes(self) -> set[int]:
        """Every living process that was started for this home, found without the supervisor's own code."""
        mark = f"HOME={self.path}\0".encode()
        found = set()
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        for folder in self.path.glob(".relay/runs/*/*"):
            self._run(self.command("end", folder))
        eventually(lambda: not self.processes(), "no process of the test is left")

    def _ask(self, verb: str, folder: Path, *options: str, stdin: str = "") -> dict[str, Any]:
        done = self._run(self.command(verb, folder, *options), stdin)
        assert done.stdout, done.stderr
        return {"rc": done.returncode, **json.loads(done.stdout)}

    def _run(self, command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=stdin, env=self.environment, capture_output=True, text=True, timeout=120
        )


class Cloud:
    """Metadata server and bucket of one host, with trouble on demand."""

    def __init__(self) -> None:
        self.preempted = False
        self.refuse_uploads = 0
        self.objects: dict[str, bytes] = {}
        self.asked = 0
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cloud.asked += 1
                assert self.headers["Metadata-Flavor"] == "Google"
                self._reply(200, b"TRUE" if cloud.preempted else b"FALSE")

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if cloud.refuse_uploads:
                    cloud.refuse_uploads -= 1
                    self._reply(503, b"try again")
                    return
                parts = urlsplit(self.path)
                bucket, name = parts.path.split("/")[5], parse_qs(parts.query)["name"][0]
                cloud.objects[f"{bucket}/{name}"] = data
                self._reply(200, b"{}")

            def _reply(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def text(self) -> str:
        """All parts of the log, in order."""
        return b"".join(self.objects[name] for name in sorted(self.objects)).decode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
