"""Exclusive creation and compare-and-set when answers are lost on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.bucket import Bucket
from tests.checkpoint.faults import FaultyGcs
from tpu.checkpoint import objects


@pytest.fixture
def run_dir(bucket: Bucket) -> str:
    return bucket.new_run()


@pytest.fixture
def faulty(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyGcs]:
    with FaultyGcs(bucket.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


def test_a_creation_whose_answer_was_lost_is_ours(run_dir: str, faulty: FaultyGcs):
    faulty.lose_answers(1, "/upload/", b"mine")
    generation = objects.create_exclusive(f"{run_dir}/a.json", b'"mine"')
    assert faulty.failed == 1
    assert objects.read(f"{run_dir}/a.json") == (b'"mine"', generation)
    with pytest.raises(objects.ObjectExists):
        objects.create_exclusive(f"{run_dir}/a.json", b'"mine"')


def test_a_change_whose_answer_was_lost_is_ours(run_dir: str, faulty: FaultyGcs):
    first = objects.create_exclusive(f"{run_dir}/a.json", b"1")
    faulty.lose_answers(1, "/upload/", b"mine")
    second = objects.compare_and_set(f"{run_dir}/a.json", b'"mine"', first)
    assert faulty.failed == 1
    assert objects.read(f"{run_dir}/a.json") == (b'"mine"', second)
    with pytest.raises(objects.StaleGeneration):
        objects.compare_and_set(f"{run_dir}/a.json", b'"late"', first)


def test_another_ones_creation_is_never_taken_for_ours(run_dir: str, faulty: FaultyGcs):
    objects.create_exclusive(f"{run_dir}/a.json", b'"theirs"')
    faulty.fail_next(1, 503, "/upload/")
    with pytest.raises(objects.ObjectExists):
        objects.create_exclusive(f"{run_dir}/a.json", b'"mine"')
