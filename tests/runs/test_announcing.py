"""What of a run's history is told to others, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.runs.histories import V4_8, at, attempt_ended, histories, intended, leased
from tpu.runs.announcing import (
    LONGEST_TEXT,
    Announcement,
    finished,
    newest,
    payload_of,
    related_of,
    resource_of,
)
from tpu.runs.event_log import RunEvent

READY = [intended(0, "a"), at(1, "slice-ready", slice="a")]
PREEMPTED = attempt_ended(3, 1, last_commit=20)


@pytest.mark.parametrize(
    ("history", "name", "payload"),
    [
        (READY, "tpu.slice.ready", {**V4_8, "slice": "a", "price_an_hour": 3.6}),
        ([leased(0, "a", [0], None)], "tpu.slice.ready", {**V4_8, "slice": "a", "price_an_hour": None}),
        (
            [*READY, PREEMPTED],
            "tpu.slice.preempted",
            {"slice": "a", "attempt": 1, "reason": "gone", "last_commit": 20, "preemptions": 1},
        ),
        (
            # One that was preempted before its gang had started counts, too; one who made room for others does not.
            [*READY, PREEMPTED, attempt_ended(4, 2, evicted=True), attempt_ended(5, None)],
            "tpu.slice.preempted",
            {"slice": "a", "attempt": None, "reason": "gone", "last_commit": None, "preemptions": 2},
        ),
        (
            [*READY, at(2, "slice-deleted", slice="a", why="done")],
            "tpu.slice.deleted",
            {"slice": "a", "reason": "done"},
        ),
        (
            [*READY, at(2, "slice-released", slice="a", why="done")],
            "tpu.slice.released",
            {"slice": "a", "reason": "done"},
        ),
        (
            [*READY, at(2, "attempt-started", attempt=2, slice="a", resume=40)],
            "tpu.run.resumed",
            {"slice": "a", "attempt": 2, "step": 40},
        ),
        (
            [at(0, "no-capacity", hours=1.0, why=["spot v4-8 in us-central2-b: no more capacity"])],
            "tpu.run.no-capacity",
            {"hours": 1.0, "why": ["spot v4-8 in us-central2-b: no more capacity"]},
        ),
        (
            [at(0, "max-cost-warned", spent=4.1, max_cost=5.0)],
            "tpu.run.max-cost-warned",
            {"spent": 4.1, "max_cost": 5.0},
        ),
        (
            [at(0, "max-cost-reached", spent=5.0, max_cost=5.0)],
            "tpu.run.max-cost-reached",
            {"spent": 5.0, "max_cost": 5.0},
        ),
    ],
)  # fmt: skip
def test_what_others_are_told(history: list[RunEvent], name: str, payload: dict[str, Any]):
    said = newest(history)
    assert said is not None
    assert (said.name, said.payload) == (name, payload)


@pytest.mark.parametrize(
    "history",
    [
        [at(0, "driver-started", term=1, owner="here:1")],
        [at(0, "slice-wanted")],
        [*READY, at(2, "attempt-started", attempt=1, slice="a", resume=None)],  # it begins, it does not go on
        [*READY, attempt_ended(3, 1, verdict="user failure")],
        [*READY, attempt_ended(3, 1, evicted=True)],
        # Of a stockout there may be hundreds.
        [intended(0, "a"), at(1, "slice-deleted", slice="a", why="no more capacity")],
    ],
)
def test_what_is_the_runs_own_affair(history: list[RunEvent]):
    assert newest(history) is None


@given(histories())
def test_whatever_the_history_its_texts_are_bounded_and_its_resources_have_names(history: list[RunEvent]):
    for number in range(1, len(history) + 1):
        try:
            said = newest(history[:number])
        except KeyError:
            continue  # of a slice that nobody asked for
        if said is not None:
            assert len(payload_of(said, "r", "gs://b/runs/r")["message"]) <= LONGEST_TEXT + len("r: ")
            assert all(
                one["prefect.resource.id"] and one["prefect.resource.role"] for one in related_of(said)
            )


def test_runs_of_the_same_name_in_two_buckets_are_two_resources():
    one, two = (resource_of("icl", f"gs://{bucket}/runs/icl") for bucket in ("mine", "yours"))
    assert one["prefect.resource.id"] != two["prefect.resource.id"]
    assert one["prefect.resource.name"] == two["prefect.resource.name"] == "icl"


def test_an_event_of_a_slice_is_related_to_it_and_to_its_zone():
    said = newest(READY)
    assert said is not None
    assert {one["prefect.resource.id"]: one["prefect.resource.role"] for one in related_of(said)} == {
        "tpu.slice.a": "slice", "tpu.zone.us-central2-b": "zone",
    }  # fmt: skip


def test_a_person_reads_a_sentence():
    figures = {
        "attempts": 3,
        "wall_s": 600.0,
        "goodput": 0.83,
        "dollars": 1.2,
        "evaluation": None,
        "seconds": {},
    }
    said = finished(figures)
    assert payload_of(said, "icl-3", "gs://b/runs/icl-3")["message"] == (
        "icl-3: finished after 10 min and 3 attempt(s), goodput 83%, $1.20"
    )
    assert payload_of(Announcement("x", "y" * 5000), "r", "d")["message"].endswith("y…")
