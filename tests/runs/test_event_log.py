import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import objects
from tpu.runs.event_log import EventLog, RunEvent, candidate_of, early_death, load_events, undeleted
from tpu.slices.candidate import Candidate


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


def life(ready_s: float | None, *ends: tuple[float, str, int | None]) -> list[RunEvent]:
    """A slice asked for at 100, ready after `ready_s`, and the ends (time, verdict, last commit) of its attempts."""
    asked = {"zone": "us-east5-a", "accelerator_type": "v6e-8", "provisioning": "spot", "price_an_hour": None}
    told = [RunEvent(100.0, "slice-intended", {"slice": "s", **asked})]
    told += [RunEvent(100.0 + ready_s, "slice-ready", {"slice": "s"})] if ready_s is not None else []
    return told + [
        RunEvent(at, "attempt-ended", {"slice": "s", "verdict": verdict, "last_commit": commit})
        for at, verdict, commit in ends
    ]


@pytest.mark.parametrize(
    ("told", "early"),
    [
        (life(60.0, (200.0, "preempted", None)), True),
        (life(60.0, (400.0, "preempted", None)), True),
        (life(60.0, (500.0, "preempted", None)), False),  # more than 5 minutes after it was ready
        (life(60.0, (200.0, "preempted", 10)), False),  # it has served
        (life(60.0, (180.0, "user failure", 10), (200.0, "preempted", None)), False),
        (life(60.0, (180.0, "user failure", None), (200.0, "preempted", None)), True),
        (life(60.0, (200.0, "infrastructure", None)), False),  # a host's fault, not the zone's
        (life(60.0, (200.0, "finished", None)), False),
        (life(60.0), False),
        (life(None, (200.0, "preempted", None)), False),  # never ready: told by who made it
    ],
)
def test_V1_a_slice_that_was_preempted_before_it_served_died_early(told: list[RunEvent], early: bool):
    assert early_death(told, "s") == (100.0 if early else None)
    assert candidate_of(told, "s") == Candidate("us-east5-a", "v6e-8", "spot")
    with pytest.raises(KeyError, match="no slice t was asked for"):
        candidate_of(told, "t")
