"""A project that is ready, and one that lacks something: each lack is a line, and hides no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tpu.checkpoint import objects
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.readiness import Finding, look
from tpu.slices.candidate import Candidate
from tpu.slices.request import SliceRequest

READY = Candidate("us-central2-b", "v4-8", "spot")


async def found(
    connection: Connection, candidate: Candidate = READY, image: str | None = None
) -> list[Finding]:
    request = SliceRequest(candidate.zone, candidate.accelerator_type, runtime_version=image)
    return await look(connection, [(candidate, request)])


@pytest.fixture
def connection(emulator: Emulator, tmp_path: Path) -> Connection:
    return dataclasses.replace(Connection.from_environment(emulator.env), home=tmp_path)


async def test_a_project_that_is_ready_has_no_lack_and_is_left_as_it_was(connection: Connection):
    findings = await found(connection)
    assert [one.what for one in findings if not one.holds] == []
    assert [one.what for one in findings] == [
        "SSH key", "bucket", "settings", "Cloud TPU API in us-central2-b", "spot v4-8 in us-central2-b",
    ]  # fmt: skip
    assert objects.listing(f"{connection.bucket}/preflight") == []


@pytest.mark.parametrize(
    ("changes", "candidate", "image", "what", "words"),
    [
        ({"bucket": "gs://not-there"}, READY, None, "bucket", "there is no bucket gs://not-there: create it"),
        (
            {},
            Candidate("us-central2-b", "v6e-8", "spot"),
            None,
            "spot v6e-8 in us-central2-b",
            "has no accelerator type v6e-8",
        ),
        ({}, READY, "no-such-image", "spot v4-8 in us-central2-b", "has no image no-such-image; it has tpu-"),
        ({"ssh_route": "jump:nobody"}, READY, None, "settings for spot v4-8 in us-central2-b", "jump"),
        ({"api_key": "wrong"}, READY, None, "Cloud TPU API in us-central2-b", "rights of the credentials"),
        (
            {"api_endpoint": "127.0.0.1:9"},
            READY,
            None,
            "Cloud TPU API in us-central2-b",
            "cloud not reachable",
        ),
        (
            {"grant": "v6e:us-east1-d:spot=64"},
            READY,
            None,
            "settings for spot v4-8 in us-central2-b",
            "grant",
        ),
    ],
    ids=["bucket", "type", "image", "route", "key", "address", "grant"],
)
async def test_what_is_lacking_is_said_with_what_to_do(
    connection: Connection,
    changes: dict[str, str],
    candidate: Candidate,
    image: str | None,
    what: str,
    words: str,
):
    findings = await found(dataclasses.replace(connection, **changes), candidate, image)  # type: ignore[arg-type]
    lacks = {one.what: one.text for one in findings if not one.holds}
    assert words in lacks[what]
    # The others are looked at all the same.
    assert any(one.holds for one in findings)
