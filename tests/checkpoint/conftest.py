"""One GCS server for the tests of checkpoints; each test has a run directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.bucket import Bucket, Training
from tpu.emulator.gcs import GcsServer


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("gcs")
    server = GcsServer(folder / "objects", folder / "gcs.log")
    url = server.start()
    yield Bucket(server, url, folder / "objects")
    server.stop()


@pytest.fixture
def bucket(bucket_server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The bucket, with the environment of this process leading to it."""
    for name, value in bucket_server.environment().items():
        monkeypatch.setenv(name, value)
    return bucket_server


@pytest.fixture
def training(bucket: Bucket, tmp_path: Path) -> Training:
    """A run of 20 steps in segments of five, attempt 1 open."""
    return Training(bucket, tmp_path, bucket.new_run())
