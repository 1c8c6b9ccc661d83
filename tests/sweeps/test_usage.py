"""What trials had of a fleet, from their histories."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.runs.histories import V4_8, at, attempt_ended, histories, intended, leased
from tpu.runs.event_log import RunEvent
from tpu.runs.ledger import make_sum
from tpu.sweeps.usage import SliceLife, Use, busy_share, fleet_use, uses_of


def test_a_preempted_trial_has_two_uses_and_what_its_program_ran_of_each():
    events = [
        leased(100, "a", [1, 2]),
        at(110, "attempt-started", attempt=1, slice="a", resume=None),
        attempt_ended(150, 1, "a"),
        at(151, "slice-deleted", slice="a"),
        intended(151, "b", chips=[0, 1]),
        at(180, "slice-ready", slice="b"),
        at(190, "attempt-started", attempt=2, slice="b", resume=10),
    ]
    assert uses_of(events, 200) == (
        Use("a", (1, 2), 2, 4, 100, 151, ((110, 150),)),
        Use("b", (0, 1), 2, 4, 180, 200, ((190, 200),)),
    )
    assert [use.where for use in uses_of(events, 200)] == ["a chips 1, 2", "b chips 0, 1"]


def test_a_fleet_is_there_by_its_leases_and_else_by_its_uses():
    uses = [
        Use("a", (0,), 1, 4, 10, 50, ((20, 40),)),
        Use("a", (1,), 1, 4, 20, 60, ((20, 60),)),
        Use("b", (0, 1, 2, 3), 4, 4, 30, 40, ()),
    ]
    points = fleet_use(uses, {"a": SliceLife(4, 0, 100)})
    assert [(p.time, p.there, p.held, p.trained) for p in points] == [
        (0, 4, 0, 0), (10, 4, 1, 0), (20, 4, 2, 2), (30, 8, 6, 2), (40, 4, 2, 1), (50, 4, 1, 1), (60, 4, 0, 0),
        (100, 0, 0, 0),
    ]  # fmt: skip
    assert busy_share(points) == (20 * 2 + 20) / (4 * 100 + 4 * 10)


def test_trials_of_a_pack_have_equal_parts_of_its_chip():
    def shared(time: float, by: int) -> RunEvent:
        return at(time, "share", **V4_8, slice="a", price_an_hour=3.6, chips=[3], at=time, shared_by=by)

    started = at(10, "attempt-started", attempt=1, slice="a", resume=None)
    first = [started, shared(10, 2), attempt_ended(40, 1), shared(40, 0)]
    second = [started, shared(10, 2), shared(40, 1)]
    uses = [*uses_of(first, 100), *uses_of(second, 100)]
    assert uses == [
        Use("a", (3,), 1, 4, 10, 40, ((10, 40),), 2),
        Use("a", (3,), 1, 4, 10, 40, ((10, 40),), 2),
        Use("a", (3,), 1, 4, 40, 100, ((40, 100),), 1),
    ]
    assert {use.where for use in uses} == {"a chip 3"}
    assert sum(use.chip_hours for use in uses) == 90 / 3600
    points = [(p.time, p.there, p.held, p.trained) for p in fleet_use(uses, {})]
    assert points == [(10, 4, 1, 1), (40, 4, 1, 1), (100, 0, 0, 0)]


# On a loaded machine drawing is slow, too: that says nothing of what is tested.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_uses_are_what_the_ledger_charges_for(events: list[RunEvent]):
    until = events[-1].time + 10 if events else 0.0
    uses = uses_of(events, until)
    held = make_sum(events, until).holdings
    assert [(u.slice, u.count, u.of) for u in uses] == [(h.slice, h.chips, h.of) for h in held]
    assert all(u.start <= a <= b <= u.end for u in uses for a, b in u.trained)
    points = fleet_use(uses, {})
    assert all(0 <= p.trained <= p.held <= p.there for p in points)
    assert not points or (points[-1].there, points[-1].held, points[-1].trained) == (0, 0, 0)
