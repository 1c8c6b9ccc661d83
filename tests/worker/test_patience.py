"""Prefect's client with our patience, against a server that really answers so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from prefect.client import base
from prefect.client.base import PrefectHttpxAsyncClient
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tpu.worker.patience import TRIES, passes, patient_settings, shorten_pauses

REFUSALS = 40  # Prefect's own pauses would add up to 35,000 years


class Busy(BaseHTTPRequestHandler):
    """Answers 503 so often, then well."""

    left = REFUSALS

    def do_GET(self) -> None:
        status = 503 if Busy.left else 200
        Busy.left -= bool(Busy.left)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def busy() -> Iterator[str]:
    Busy.left = REFUSALS
    server = HTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_a_busy_server_is_asked_often_and_never_after_a_long_pause(
    busy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        base, "clamped_poisson_interval", base.clamped_poisson_interval
    )  # restored afterwards
    shorten_pauses(longest_s=0.01)
    with temporary_settings(patient_settings()):
        async with PrefectHttpxAsyncClient() as client:
            assert (await client.get(busy)).status_code == 200
    assert Busy.left == 0


def test_whoever_wants_more_patience_keeps_it():
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: TRIES + 1}):
        assert patient_settings() == {PREFECT_CLIENT_MAX_RETRIES: TRIES + 1}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ConnectError("refused"), True),
        (TimeoutError(), True),
        (429, True),
        (408, True),
        (500, True),
        (503, True),
        (401, False),
        (403, False),
        (404, False),
        (ValueError(), False),
    ],
)
def test_a_wrong_key_is_told_and_a_busy_server_waited_for(error: Exception | int, expected: bool):
    if isinstance(error, int):
        request = httpx.Request("GET", "http://server")
        error = httpx.HTTPStatusError("", request=request, response=httpx.Response(error, request=request))
    assert passes(error) is expected
