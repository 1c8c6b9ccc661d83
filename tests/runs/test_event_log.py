import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import objects
from tpu.runs.event_log import EventLog, RunEvent, load_events, undeleted


def test_events_come_back_in_the_order_of_terms_and_numbers(track: Track):
    run_dir = track.directory("told")
    clock = iter(range(100, 0, -1))  # a clock that goes backwards changes no order
    first = EventLog(run_dir, 1, lambda: float(next(clock)))
    told = [first.append("a", x=n) for n in range(12)]
    second = EventLog(run_dir, 2, lambda: float(next(clock)))
    assert second.events == told
    told.append(second.append("b", text="ü\n", nested={"k": [1, None]}))
    assert load_events(run_dir) == told == second.events


def test_a_run_without_events(track: Track):
    assert load_events(track.directory("none")) == []


def test_two_writers_of_one_term_are_told_apart(track: Track):
    one, two = (EventLog(track.directory("twice"), 1, lambda: 0.0) for _ in range(2))
    one.append("a")
    with pytest.raises(objects.ObjectExists):
        two.append("a", other=True)
    assert [event.kind for event in load_events(track.directory("twice"))] == ["a"]


def test_a_run_does_not_see_the_events_of_one_with_a_longer_name(track: Track):
    EventLog(track.directory("run-10"), 1, lambda: 0.0).append("a")
    assert load_events(track.directory("run-1")) == []


def test_slices_that_nobody_has_seen_deleted():
    def event(kind: str, name: str) -> RunEvent:
        return RunEvent(0.0, kind, {"slice": name})

    told = [event("slice-intended", name) for name in "abc"]
    told += [event("slice-ready", "a"), event("slice-deleted", "b")]
    assert undeleted(told) == ["a", "c"]
