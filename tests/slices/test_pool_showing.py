"""A pool in words."""

from __future__ import annotations

from dataclasses import replace

from tpu.slices.candidate import Candidate
from tpu.slices.lease import Claim, Holder, claim, gone, intend, quarantine, ready, release, take
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_showing import pool_lines, slice_lines

V4 = Candidate("us-central2-b", "v4-8", "spot", 3.6)
SETTINGS = PoolSettings(evict_minutes=3)
LEASE = ready(intend("s", "p", V4, 4, "maker", 0.0), 0.0)


def test_a_free_slice_says_how_long_it_is_idle_and_who_had_it():
    used = release(take(LEASE, Holder("a", "u", (0, 1, 2, 3)), 60.0), "u", 120.0)
    lines = slice_lines(used, SETTINGS, 180.0)
    assert lines[1] == "  idle for 60 s"
    assert lines[2].endswith("nobody, all chips")
    assert lines[3].endswith("a, all chips")


def test_a_claim_says_whether_holders_leave_and_when_at_the_latest():
    held = take(LEASE, Holder("a", "u", (0,)), 60.0)
    big = Claim("big", "v", 5, (0, 1))
    early = claim(held, big, 1.0)
    told = "  chips 0, 1 wanted by big (priority 5): "
    assert told + "it waits for them" in slice_lines(early, SETTINGS, 80.0)
    due = claim(early, replace(big, due=True), 120.0)
    due = claim(due, replace(big, due=True), 130.0)  # its beat
    for now, latest in [(120.0, "in 3 minutes at the latest"), (240.0, "in 1 minute at the latest"),
                        (270.0, "in 30 s at the latest"), (330.0, "at once")]:  # fmt: skip
        assert f"{told}its holders leave at their next commit, or {latest}" in slice_lines(due, SETTINGS, now)


def test_one_that_is_unfit_says_why():
    assert (
        "quarantined (chip 2 is busy)" in slice_lines(quarantine(LEASE, "chip 2 is busy"), SETTINGS, 9.0)[0]
    )


def test_the_sum_has_what_it_cost_and_what_was_idle():
    past = gone(LEASE, "idle", 3600.0)
    lines = pool_lines("p", PoolSettings(max_slices=2), [past, LEASE], 7200.0)
    assert lines[0] == "pool p: 1 slice(s), 1 of them idle, 1 past"
    assert lines[-1] == "cost so far: $10.80, $10.80 of it idle; now $3.60 an hour, $3.60 of it idle"
