"""Hours in which a gang trained and nobody watched are told by the gang itself."""

from __future__ import annotations

import pytest

from tests.runs.histories import at, attempt_ended
from tpu.runs.goodput import partition, run_intervals
from tpu.runs.unwatched import filled_in

STARTED = at(100.0, "attempt-started", attempt=1, slice="a", resume=None)


def records(offset: float = 0.0):
    said = [
        (101.0, {"event": "phase", "phase": "start"}),
        (105.0, {"event": "phase", "phase": "step"}),
        (1105.0, {"step": 100}),
        (1106.0, {"event": "commit", "step": 100}),
        (2105.0, {"step": 200}),
        (2106.0, {"event": "commit", "step": 200}),
        (2605.0, {"step": 250}),
    ]
    return [(1, {"t": t + offset, **record}) for t, record in said]


def ended(**detail):
    return attempt_ended(9000.0, 1, reached=None, last_commit=200, **detail)


# The host's clock may be right, or an hour off in either direction.
@pytest.mark.parametrize("offset", [0.0, -3600.0, 7200.0])
def test_the_gangs_own_records_say_where_the_time_went(offset):
    events = filled_in([STARTED, ended()], records(offset))
    seconds = partition(run_intervals(events), 100.0, 9000.0)
    assert seconds["step"] == pytest.approx(2000, abs=5)
    assert seconds["wasted"] == pytest.approx(500, abs=5)
    # Between its last word and the driver that came nobody knows.
    assert sum(seconds.values()) == pytest.approx(8900)
    assert seconds["start"] + seconds["other"] == pytest.approx(6400, abs=10)
    assert [step for _, step in events[1].detail["commits"]] == [100, 200]
    assert events[1].detail["reached"] == 250


def test_without_records_the_history_stays_as_it_is():
    assert filled_in([STARTED, ended()], []) == [STARTED, ended()]


def test_what_a_driver_has_watched_is_not_touched():
    watched = attempt_ended(9000.0, 1, phases=[(101.0, "step")], reached=10, last_commit=10)
    before_its_first_sign = attempt_ended(9000.0, 1, reached=0)
    without_gang = attempt_ended(9000.0, None, reached=None)
    for event in (watched, before_its_first_sign, without_gang):
        assert filled_in([STARTED, event], records()) == [STARTED, event]
