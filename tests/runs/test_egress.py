"""What an attempt has moved between slice and bucket. Table."""

from __future__ import annotations

import pytest

from tpu.runs.egress import moved


@pytest.mark.parametrize(
    ("resume", "last_commit", "hosts", "expected"),
    [
        (None, None, 2, (0, 0)),  # died before its first checkpoint
        (None, 10, 2, (0, 1)),
        (None, 40, 1, (0, 4)),
        (20, 40, 2, (2, 2)),  # every host reads what it begins with
        (20, None, 4, (4, 0)),
        (20, 20, 1, (1, 0)),
        (20, 33, 1, (1, 2)),  # the last one after a preemption notice
    ],
)
def test_checkpoints_read_and_written(
    resume: int | None, last_commit: int | None, hosts: int, expected: tuple[int, int]
):
    assert moved((10, 20, 30, 40), resume, last_commit, hosts) == expected
