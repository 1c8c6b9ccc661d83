"""A proxy before the real local server that refuses requests or loses answers on demand."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit


class FaultyGcs:
    """Passes every request on to `upstream`, but for the ones it was told to spoil."""

    def __init__(self, upstream: str) -> None:
        self.failed = 0
        self._lock = threading.Lock()
        self._left, self._code, self._path, self._containing, self._lose = 0, 503, "", b"", False
        host = urlsplit(upstream).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                spoil = proxy._spoils(self.path, body)
                if spoil == "refuse":
                    self._answer(proxy._code, b'{"error": {"message": "refused on demand"}}', {})
                    return
                connection = http.client.HTTPConnection(host, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if spoil == "lose":
                    self._answer(503, b"{}", {})
                    return
                headers = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
                self._answer(answer.status, content, headers)

            def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail_next(self, times: int, code: int, path: str = "") -> None:
        """Refuse the next `times` requests whose path contains `path`."""
        with self._lock:
            self._left, self._code, self._path, self._containing, self._lose = times, code, path, b"", False

    def fail_always(self, code: int | None, path: str = "") -> None:
        """Refuse everything whose path contains `path` until called with None."""
        self.fail_next(0 if code is None else 1 << 60, code or 503, path)

    def lose_answers(self, times: int, path: str, containing: bytes) -> None:
        """Pass the next requests on, but answer 503."""
        with self._lock:
            self._left, self._path, self._containing, self._lose = times, path, containing, True

    def _spoils(self, path: str, body: bytes) -> str:
        with self._lock:
            if self._left <= 0 or self._path not in path or self._containing not in body:
                return ""
            self._left -= 1
            self.failed += 1
            return "lose" if self._lose else "refuse"

    def __enter__(self) -> FaultyGcs:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
