import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs.histories import at, attempt_ended, histories, intended, leased
from tpu.runs.goodput import BUCKETS, Interval
from tpu.runs.ledger import make_ledger
from tpu.runs.timeline import (
    COLOURS,
    NAMED_SLICES,
    Bar,
    Timeline,
    layout_of,
    make_timeline,
    timeline_picture,
    visible,
)


def preempted_run(slices: int, life: float = 1000.0):
    events = []
    for number in range(slices):
        begin, name = number * life, f"relay-r-{number + 1}"
        end = begin + life - 10
        events += [
            intended(begin, name),
            at(begin + 100, "slice-ready", slice=name),
            at(begin + 100, "attempt-started", attempt=number + 1),
            attempt_ended(end, number + 1, name, phases=[(begin + 100, "step")], waste_from=end - 50,
                          commits=[(end - 50, number)]),
            at(end + 5, "slice-deleted", slice=name),
        ]  # fmt: skip
    return events


def test_a_bar_goes_from_the_wish_for_a_slice_to_its_end():
    timeline = make_timeline(preempted_run(2), until=2000)
    assert timeline.bars[0] == Bar(
        "relay-r-1",
        (
            Interval("provisioning", 0, 100), Interval("step", 100, 940), Interval("wasted", 940, 990),
            Interval("provisioning", 990, 995),
        ),
        commits=(940,),
        ends=((990, "preempted"),),
    )  # fmt: skip
    assert [bar.slice for bar in timeline.bars] == ["relay-r-1", "relay-r-2"]
    assert (timeline.start, timeline.end) == (0, 2000)


def test_an_early_end_is_told_apart_by_whose_doing_it_was():
    ends = [("preempted", {}), ("cancelled", {}), ("cancelled", {"evicted": True}), ("user failure", {}),
            ("infrastructure", {}), ("finished", {})]  # fmt: skip
    events = [intended(0, "a"), at(0, "slice-ready", slice="a")]
    events += [attempt_ended(n, n, verdict=verdict, **more) for n, (verdict, more) in enumerate(ends, 1)]
    (bar,) = make_timeline(events, until=100).bars
    assert bar.ends == ((1, "preempted"), (3, "evicted"), (4, "failed"), (5, "failed"))


def test_a_slice_of_the_pool_has_a_bar_each_time_it_is_had():
    events = [leased(0, "a", [0]), at(50, "slice-released", slice="a"), leased(70, "a", [0])]
    assert [(bar.start, bar.end) for bar in make_timeline(events, until=100).bars] == [(0, 50), (70, 100)]


def test_a_slice_that_never_was_ready_is_provisioning_to_its_end():
    events = [intended(0, "a"), at(50, "provision-failed", slice="a"), at(60, "slice-deleted", slice="a")]
    (bar,) = make_timeline(events, until=100).bars
    assert bar.parts == (Interval("provisioning", 0, 60),)


def test_a_few_slices_have_a_line_each_and_many_share_lines_on_which_bars_stay_wide():
    few = make_timeline(preempted_run(NAMED_SLICES), until=NAMED_SLICES * 1000)
    assert (layout_of(few).lines, layout_of(few).lane) == (1, tuple(range(NAMED_SLICES)))
    many = make_timeline(preempted_run(100), until=100_000)
    layout = layout_of(many)
    assert layout.lanes == 1
    # Three hours a line: a slice that lived 1,000 s has a tenth of the width.
    assert (layout.span, layout.lines) == (10_800, 10)
    # What reaches over the end of a line goes on in the next.
    assert layout.places(10, 10_000, 10_995) == [(0, 10_000, 10_800), (1, 0, 195)]


def test_slices_that_were_there_at_once_lie_in_lanes():
    both = [Interval("step", 0, 100)]
    bars = tuple(
        Bar(f"{n}{side}", tuple(Interval("step", p.start + 100 * n, p.end + 100 * n) for p in both))
        for n in range(20)
        for side in "ab"
    )
    layout = layout_of(Timeline(0, 2000, bars))
    assert layout.lanes == 2
    assert layout.lane == (0, 1) * 20


parts = st.lists(st.tuples(st.sampled_from(BUCKETS), st.floats(0.01, 100)), min_size=1, max_size=40)


@given(parts, st.floats(0.1, 500))
def test_what_is_too_short_to_be_drawn_is_joined_and_no_time_is_lost(lengths, least):
    made, time = [], 0.0
    for bucket, length in lengths:
        made.append(Interval(bucket, time, time + length))
        time += length
    shown = visible(made, least)
    assert (shown[0].start, shown[-1].end) == (0.0, time)
    assert all(a.end == b.start for a, b in pairwise(shown))
    assert all(one.end - one.start >= least * 0.999 for one in shown[1:])


def test_many_short_parts_are_shown_as_what_most_of_them_are():
    steps = [
        Interval(bucket, start, start + length)
        for n in range(1000)
        for bucket, start, length in (("step", 10.0 * n, 9.0), ("save", 10.0 * n + 9, 1.0))
    ]
    assert {one.bucket for one in visible([Interval("compile", -5, 0), *steps], 100)} == {"step"}


@pytest.mark.parametrize("slices", [1, 3, 100, 400])
def test_the_picture_is_of_a_size_that_is_read(slices):
    picture = timeline_picture(make_timeline(preempted_run(slices), until=slices * 1000), "r")
    assert picture is not None
    width, height = (int.from_bytes(picture[16 + 4 * i : 20 + 4 * i], "big") for i in range(2))
    assert width == 990
    assert 150 < height < 1100
    assert len(picture) < 200_000  # it lies in an artifact, as text


def test_a_long_history_takes_no_longer_than_its_length():
    def processor_s(slices: int) -> float:
        events = preempted_run(slices)
        began = time.process_time()
        make_timeline(events, until=slices * 1000)
        make_ledger(events, range(1, 100), slices * 1000)
        return time.process_time() - began

    processor_s(10)
    few, many = (min(processor_s(slices) for _ in range(3)) for slices in (200, 2000))
    assert many < 30 * few  # ten times as long; were each slice compared with all others, a hundred


@settings(max_examples=8, deadline=None)
@given(histories())
def test_any_history_can_be_drawn(events):
    timeline = make_timeline(events, until=(events[-1].time if events else 0) + 10)
    assert (timeline_picture(timeline, "any") is None) == (not timeline.bars)


def test_every_bucket_has_a_colour_of_its_own():
    assert set(COLOURS) == set(BUCKETS)
    assert len(set(COLOURS.values())) == len(BUCKETS)
