"""What `relay show` tells of a run's history."""

from __future__ import annotations

from tests.runs.histories import at, attempt_ended, intended
from tpu.runs.event_log import RunEvent
from tpu.runs.showing import event_lines


def tries(start: int, count: int) -> list[RunEvent]:
    """Tries in two zones in turn, none of which gets a slice."""
    events = []
    for n in range(start, start + count):
        events += [
            intended(n, f"s{n}", zone=f"zone-{n % 2}"),
            at(n, "provision-failed", slice=f"s{n}", reason=f"stockout {n}\nand more"),
            at(n, "slice-deleted", slice=f"s{n}", why=f"stockout {n}"),
        ]
    return events


def test_hundreds_of_stockouts_are_a_line_a_candidate_each_time_that_the_run_waits():
    served = [intended(500, "own"), at(501, "slice-ready", slice="own"), attempt_ended(600, 1, "own"),
              at(601, "slice-deleted", slice="own", why="preempted")]  # fmt: skip
    lines = [
        line.split(" ", 2)[2] for line in event_lines([*tries(0, 400), *served, *tries(700, 1)], commits=True)
    ]
    assert len(lines) == 6
    for zone in (0, 1):
        assert lines[zone].startswith(f"spot v4-8 in zone-{zone} was not had: 200 tries since ")
        assert lines[zone].endswith(f"; the last one: stockout {398 + zone}")
    assert lines[2:] == [
        "slice own is ready",
        "attempt 1 ended: preempted, gone",
        "slice own is deleted: preempted",
        "spot v4-8 in zone-0 was not had: stockout 700",
    ]
