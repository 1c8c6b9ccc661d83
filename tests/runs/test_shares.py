"""What runs of a pack pay: all of what their pack held, each second once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs.histories import at, leased
from tpu.runs.event_log import RunEvent
from tpu.runs.ledger import holdings, make_sum
from tpu.runs.shares import Share, next_shares, paid_last, share_detail


class Pack:
    """A pack and its runs, as the carrier of a pack keeps their histories."""

    def __init__(self, *names: str) -> None:
        self.events: list[RunEvent] = []
        self.runs: dict[str, list[RunEvent]] = {name: [] for name in names}
        self.joined = dict.fromkeys(names, 0.0)
        self.there = set(names)

    def look(self, now: float) -> None:
        for name, events in self.runs.items():
            shared_by = len(self.there) if name in self.there else 0
            held = holdings(self.events, now)
            for share in next_shares(paid_last(events), held, shared_by, self.joined[name], now):
                events.append(at(now, "share", **share_detail(share, self.events)))

    def dollars(self, until: float) -> tuple[float, dict[str, float]]:
        parts = {name: make_sum(events, until).dollars or 0.0 for name, events in self.runs.items()}
        return make_sum(self.events, until).dollars or 0.0, parts


def test_a_run_pays_more_when_another_one_has_ended_and_from_the_first_second_of_a_slice():
    pack = Pack("a", "b")
    pack.events += [leased(0, "s", [2], 36.0)]  # of four chips: a quarter of a cent a second
    pack.look(5)
    pack.there = {"a"}
    pack.look(100)
    pack.events += [at(200, "slice-released", slice="s", why="done")]
    pack.look(210)
    whole, parts = pack.dollars(1000)
    assert whole == pytest.approx(0.5)
    assert parts == pytest.approx({"a": 0.375, "b": 0.125})


@given(st.lists(st.sampled_from(["slice", "gone", "a", "b", "c", "look"]), max_size=25))
def test_what_the_runs_pay_is_what_the_pack_held_whatever_happens(happenings: list[str]):
    pack, now, slices = Pack("a", "b", "c"), 0.0, 0
    for one in happenings:
        now += 10
        held = [holding.slice for holding in holdings(pack.events, now) if holding.open]
        if one == "slice" and not held:
            slices += 1
            pack.events.append(leased(now, f"s{slices}", [0], 36.0))
        elif one == "gone" and held:
            pack.events.append(at(now, "slice-deleted", slice=held[0]))
        elif one in pack.there and len(pack.there) > 1:
            pack.there -= {one}
            pack.look(now)
        elif one == "look":
            pack.look(now + 3)
    pack.look(now + 10)
    whole, parts = pack.dollars(now + 20)
    assert sum(parts.values()) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("paid", "shared_by", "wanted"),
    [
        (None, 2, [Share("s", 100.0, 2)]),  # from the slice's first second
        (Share("s", 100.0, 2), 2, []),
        (Share("s", 100.0, 2), 1, [Share("s", 300.0, 1)]),
        (Share("s", 100.0, 2), 0, [Share("s", 300.0, 0)]),
        (Share("s", 150.0, 0), 0, []),
        (Share("old", 50.0, 2), 0, [Share("old", 90.0, 0)]),  # it left while the next one was on its way
    ],
)
def test_what_changes(paid: Share | None, shared_by: int, wanted: list[Any]):
    events = [
        leased(40, "old", [0], 1.0), at(90, "slice-deleted", slice="old"), leased(100, "s", [0], 1.0)
    ]  # fmt: skip
    assert next_shares(paid, holdings(events, 300), shared_by, 95.0, 300.0) == wanted
