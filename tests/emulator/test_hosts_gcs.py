"""The local GCS server, asked by Google's own client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.emulator.machines import alive
from tpu.emulator.gcs import GcsError, GcsServer, find_binary

BUCKET = "relay-emulated"


@pytest.fixture
def server(tmp_path) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path / "objects", tmp_path / "logs" / "gcs.log")
    yield server
    server.stop()


def bucket_at(url: str, name: str = BUCKET) -> storage.Bucket:
    client = storage.Client(
        project="emulated-project", credentials=AnonymousCredentials(), client_options={"api_endpoint": url}
    )
    return client.bucket(name)


def test_objects_go_in_and_out(server: GcsServer):
    bucket = bucket_at(server.start())
    assert bucket.exists()
    data = os.urandom(3_000_000)
    bucket.blob("runs/a/data.bin").upload_from_string(data)
    assert bucket.blob("runs/a/data.bin").download_as_bytes() == data
    assert [blob.name for blob in bucket.list_blobs(prefix="runs/")] == ["runs/a/data.bin"]
    with pytest.raises(NotFound):
        bucket.blob("runs/b").download_as_bytes()


def test_exclusive_creation_and_compare_and_set(server: GcsServer):
    bucket = bucket_at(server.start())
    bucket.blob("fence.json").upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        bucket.blob("fence.json").upload_from_string(b"2", if_generation_match=0)

    generation = bucket.get_blob("fence.json").generation
    bucket.blob("fence.json").upload_from_string(b"3", if_generation_match=generation)
    with pytest.raises(PreconditionFailed):
        bucket.blob("fence.json").upload_from_string(b"4", if_generation_match=generation)
    assert bucket.get_blob("fence.json").download_as_bytes() == b"3"


def test_objects_survive_a_restart(server: GcsServer):
    bucket_at(server.start()).blob("kept").upload_from_string(b"kept")
    server.stop()
    assert bucket_at(server.start()).blob("kept").download_as_bytes() == b"kept"


def test_thousands_of_requests_do_not_fill_a_pipe(server: GcsServer):
    url = server.start()
    for _ in range(1500):  # the wheel's own class hangs after some 460
        with pytest.raises(urllib.request.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/storage/v1/b/{BUCKET}/o/missing", timeout=10)


def test_two_servers_side_by_side(server: GcsServer, tmp_path):
    other = GcsServer(tmp_path / "others", tmp_path / "other.log", bucket="another")
    try:
        first, second = bucket_at(server.start()), bucket_at(other.start(), "another")
        first.blob("mine").upload_from_string(b"mine")
        assert not second.blob("mine").exists()
    finally:
        other.stop()


def test_it_dies_with_the_process_that_started_it(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tpu.emulator.gcs import GcsServer\n"
        "server = GcsServer(Path(sys.argv[1]), Path(sys.argv[1]) / 'log')\n"
        "server.start(); print(server.pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.02)


def test_a_machine_without_a_binary_is_told_so(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(GcsError, match=r"fake-gcs-server-linux-pdp11 is not there"):
        find_binary()


def test_the_binary_is_the_wheels(server: GcsServer):
    assert Path(find_binary()).stat().st_mode & 0o100
