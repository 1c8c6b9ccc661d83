"""The pool that a run names: one that is there, and its idle minutes."""

from __future__ import annotations

import asyncio

import pytest

from tests.runs.terminal import Terminal
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.runs.opening import keep_idle
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_names import NoSuchPool, check_usable


@pytest.fixture
def bucket(emulator: Emulator) -> str:
    return Connection.from_environment(emulator.env).bucket


def test_a_mistyped_pool_is_refused_with_the_one_that_was_meant(bucket: str, terminal: Terminal):
    check_usable(bucket, "default")  # which nobody need make
    with pytest.raises(
        NoSuchPool, match=r"none named defualt .*did you mean default\? `relay pool set defualt`"
    ):
        check_usable(bucket, "defualt")
    assert terminal.relay("pool", "set", "sweeps", "--max-slices", "4").code == 0
    check_usable(bucket, "sweeps")
    with pytest.raises(NoSuchPool, match="there are: default, sweeps"):
        check_usable(bucket, "zzz")


def test_a_work_pool_sets_the_idle_minutes_and_nothing_else(bucket: str, terminal: Terminal):
    assert terminal.relay("pool", "set", "sweeps", "--max-slices", "4").code == 0
    book = GcsLeaseBook(bucket)
    asyncio.run(keep_idle(book, "sweeps", 20))
    settings = asyncio.run(book.settings("sweeps"))
    assert (settings.idle_minutes, settings.max_slices) == (20, 4)
