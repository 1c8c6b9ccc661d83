"""Where messages arrive: an HTTP server on the loopback that keeps what is sent to it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """`got` holds path and JSON body of each request, in order."""

    port: int
    got: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def at(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in list(self.got) if where.rstrip("/") == path]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.got.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
