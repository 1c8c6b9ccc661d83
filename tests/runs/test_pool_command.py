"""`relay pool` on pools of a real bucket."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.runs.terminal import Terminal
from tpu.connection import Connection
from tpu.emulator.emulator import Emulator
from tpu.slices.candidate import Candidate
from tpu.slices.lease import Holder, gone, intend, ready, release, take
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.pool_settings import PoolSettings

V4 = Candidate("us-central2-b", "v4-8", "spot", 3.22)


@pytest.fixture
def book(emulator: Emulator) -> GcsLeaseBook:
    return GcsLeaseBook(Connection.from_environment(emulator.env).bucket)


def test_settings_are_changed_one_by_one_and_shown(book: GcsLeaseBook, terminal: Terminal):
    said = terminal.relay("pool", "set", "--idle-minutes", "20", "--max-slices", "4")
    assert said.out == "idle_minutes 20, min_slices 0, max_slices 4, evict_minutes 10\n"
    said = terminal.relay(
        "pool", "set", "default", "--max-slices", "none", "--min-slices", "1",
        "--candidate", "spot v4-8 in us-central2-b at 3.22",
    )  # fmt: skip
    assert said.out == (
        "idle_minutes 20, min_slices 1, max_slices no limit, evict_minutes 10\n"
        "min_slices are had as spot v4-8 in us-central2-b\n"
    )
    wanted = PoolSettings(20, 1, None, 10, (V4,))
    assert asyncio.run(book.settings("default")) == wanted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--min-slices", "1"), "wants candidates"),
        (("--idle-minutes", "-1"), "0 or more"),
        (("--idle-minutes", "nan"), "0 or more"),
        (("--evict-minutes", "inf"), "0 or more"),
        (("--max-slices", "many"), "a number or none"),
        (("--candidate", "v4-8"), "write a candidate as"),
        (("--candidate", "spot v4-9 in z"), "unknown accelerator type"),
        (("--candidate", "spot v4-8 in z at much"), "no number"),
        (("--candidate", "spot v4-8 in a/b at 1"), "the zone in"),
        (("--candidate", "spot v4-8 in z at -1"), "0 or more"),
        (("--candidate", "spot v4-8 in z at nan"), "0 or more"),
        (("größe", "--idle-minutes", "1"), "a pool is named by"),
        (("a/b", "--idle-minutes", "1"), "a pool is named by"),
    ],
)
def test_settings_that_cannot_be_are_one_line(book: GcsLeaseBook, terminal: Terminal, words, sentence: str):
    answer = terminal.relay("pool", "set", *words)
    assert (answer.code, sentence in answer.sentence) == (2, True), answer
    assert asyncio.run(book.settings("default")) == PoolSettings()


def test_a_pool_shows_who_has_which_chips(book: GcsLeaseBook, terminal: Terminal):
    lease = ready(intend("relay-a-1", "sweep", V4, 4, "uid", 1e9), 1e9)
    asyncio.run(book.create(take(lease, Holder("seed-3", "u3", (1, 2), priority=5), 1e9)))
    told = terminal.relay("pool", "show", "sweep").out
    assert "pool sweep: 1 slice(s), 0 of them idle" in told
    assert "relay-a-1: spot v4-8 in us-central2-b, ready, since 2001-" in told
    assert "  chips 1, 2: seed-3 (priority 5) for " in told
    assert "  chips 0, 3: free" in told


def test_what_new_settings_find_idle_is_named_with_who_deletes_it(book: GcsLeaseBook, terminal: Terminal):
    idle = ready(intend("relay-a-1", "p", V4, 4, "uid", 1e9), 1e9)
    asyncio.run(book.create(idle))
    asyncio.run(book.create(take(replace(idle, slice="relay-a-2"), Holder("r", "u", (0, 1, 2, 3)), 1e9)))
    assert "idle now" not in terminal.relay("pool", "set", "p", "--idle-minutes", "1e9").out
    lines = terminal.relay("pool", "set", "p", "--idle-minutes", "0").out.splitlines()
    assert lines[1:] == [
        "idle now: relay-a-1; deleted by the next `relay reap --pool p` (or by the reap deployment), not before"
    ]


@pytest.mark.parametrize("command", ["show", "cost"])
def test_a_pool_that_is_not_there_is_no_empty_one(book: GcsLeaseBook, terminal: Terminal, command: str):
    past = gone(ready(intend("relay-a-1", "past", V4, 4, "uid", 1e9), 1e9), "idle", 1e9)
    asyncio.run(book.create(past))
    assert terminal.relay("pool", "set", "empty", "--max-slices", "2").code == 0
    wrong = terminal.relay("pool", command, "nopool")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.sentence.startswith("there is no pool nopool in gs://")
    assert wrong.sentence.endswith("neither settings nor slices; there are: empty, past")
    for there in ("empty", "past"):
        assert terminal.relay("pool", command, there).code == 0


def test_a_pool_tells_what_it_has_cost_and_to_whom(book: GcsLeaseBook, terminal: Terminal):
    hour = Candidate("us-central2-b", "v4-8", "spot", 4.0)
    lease = take(ready(intend("relay-a-1", "old", hour, 4, "uid", 0), 0), Holder("seed-3", "u3", (1, 2)), 0)
    lease = gone(release(lease, "u3", 3600), "idle", 7200)
    asyncio.run(book.create(lease))
    unpriced = Candidate("us-central2-b", "v4-8", "spot")
    asyncio.run(book.create(gone(ready(intend("relay-a-2", "old", unpriced, 4, "uid", 0), 0), "idle", 3600)))
    assert terminal.relay("pool", "cost", "old").out.splitlines() == [
        f"{'seed-3':40} {'$2.00':>12}",
        f"{'idle':40} {'$6.00':>12}",
        f"{'all':40} {'$8.00':>12}",
        "1.0 h of spot v4-8 in us-central2-b: price not set",
        "now: 0 slice(s), $0.00 an hour, $0.00 of it for chips that no run has",
    ]
