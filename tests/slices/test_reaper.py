"""Which slices the reaper deletes, and which it leaves alone: the whole table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.cloud import Node, NodeState, QueuedResource, QueuedResourceState
from tpu.cloud.values import INTENT_LABEL, NodeHealth
from tpu.slices import lease as leases
from tpu.slices.candidate import Candidate
from tpu.slices.labels import RUN_LABEL, ownership_labels
from tpu.slices.lease import Claim, Holder, Lease, LeaseState
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.reaper import (
    Deletion,
    Driver,
    Facts,
    Plan,
    Sighting,
    plan,
    runs_to_watch,
    sightings,
)

BUCKET, ZONE = "gs://b", "us-central2-b"
SPOT = Candidate(ZONE, "v4-8", "spot", 2.5)
NOW = 100_000.0
OURS = {**ownership_labels("default", "alice", "r", BUCKET), INTENT_LABEL: "0123"}
ACTIVE, READY = QueuedResourceState.ACTIVE, NodeState.READY


def queued(
    name: str, state: QueuedResourceState = ACTIVE, labels: Mapping[str, str] = OURS
) -> QueuedResource:
    return QueuedResource(name, ZONE, state, "v4-8", (name,), spot=True, labels=labels)


def node(name: str, state: NodeState = READY, labels: Mapping[str, str] = OURS, spot: bool = True) -> Node:
    return Node(name, ZONE, state, NodeHealth.HEALTHY, "v4-8", "base", (), spot, False, name, labels=labels)


def seen(name: str = "s", q: Any = ACTIVE, n: Any = READY, labels: Mapping[str, str] = OURS) -> Sighting:
    return Sighting(name, ZONE, queued(name, q, labels) if q else None, node(name, n, labels) if n else None)


def intended(name: str = "s", created: float = NOW - 600, holder: Holder | None = None) -> Lease:
    return leases.intend(name, "default", SPOT, 4, "creator", created, holder)


def held(name: str = "s", run: str = "r") -> Lease:
    holder = Holder(run, f"uid-{run}", (0, 1, 2, 3))
    return leases.ready(intended(name, holder=holder), NOW - 500)


def free(name: str = "s", minutes: float = 30.0) -> Lease:
    return leases.ready(intended(name, NOW - 60 * minutes - 100), NOW - 60 * minutes)


def facts(
    *found: Lease,
    silent: Mapping[str, Collection[Holder | Claim]] | None = None,
    drivers: Mapping[str, Driver] | None = None,
    damaged: Mapping[str, str] | None = None,
    **settings: Any,
) -> Facts:
    if settings.get("min_slices"):
        settings["candidates"] = (SPOT,)
    return Facts(
        BUCKET, {lease.slice: lease for lease in found}, {"default": PoolSettings(**settings)}, silent or {},
        drivers or {}, damaged or {}, NOW,
    )  # fmt: skip


def decide(known: Facts, *found: Sighting, pool: str | None = None) -> Plan:
    return plan(found, known, {ZONE}, pool)


def deleted(known: Facts, *found: Sighting) -> dict[str, str]:
    return {one.sighting.name: one.reason for one in decide(known, *found).deletions}


def left(known: Facts, *found: Sighting) -> dict[str, str]:
    return {one.name: one.reason for one in decide(known, *found).left}


# --- what is not ours ---


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"relay-pool": "default"},  # somebody else's label, without an intent of ours
        {INTENT_LABEL: "0123"},
        {"team": "other"},
    ],
)
@pytest.mark.parametrize("state", [READY, NodeState.PREEMPTED, NodeState.STOPPED])
def test_what_is_not_ours_is_never_touched(labels, state):
    found = decide(facts(), seen(n=state, q=None, labels=labels))
    assert (found.deletions, found.left, found.strangers) == ((), (), 1)


@pytest.mark.parametrize("state", [READY, NodeState.PREEMPTED])
def test_what_another_bucket_made_is_left_alone_also_dead_and_under_our_pools_name(state):
    theirs = {**ownership_labels("default", "bob", "r", "gs://other"), INTENT_LABEL: "0123"}
    assert left(facts(), seen(n=state, labels=theirs)) == {"s": "it belongs to the bucket other"}


def test_what_does_not_say_its_bucket_is_left_alone_unless_a_lease_or_a_run_of_ours_knows_it():
    nobody = {k: v for k, v in OURS.items() if k != "relay-bucket"}
    (one,) = decide(facts(), seen(labels=nobody)).left
    assert one.doubtful
    assert "delete it by hand" in one.reason
    known = facts(drivers={"r": Driver.SILENT})
    assert deleted(known, seen(labels=nobody)) == {
        "s": "its run r has no driver any more, and it has no lease"
    }
    assert list(deleted(facts(free()), seen(labels=nobody))) == ["s"]


def test_of_one_pool_only_its_slices_are_looked_at():
    other = {**ownership_labels("other", "alice", "r", BUCKET), INTENT_LABEL: "0123"}
    found = decide(facts(), seen("a"), seen("b", labels=other), pool="other")
    assert [one.sighting.name for one in found.deletions] == ["b"]
    assert found.left == ()


# --- held, silent, dead ---


def test_what_a_living_run_holds_is_left_alone_whatever_the_cloud_shows():
    for state in NodeState:
        assert list(left(facts(held()), seen(n=state))) == ["s"]
    assert (
        "has still to see that the node is PREEMPTED" in left(facts(held()), seen(n=NodeState.PREEMPTED))["s"]
    )


def test_what_outlived_its_holder_is_deleted_and_the_holder_dropped():
    lease = held()
    known = facts(lease, silent={"s": lease.holders})
    (one,) = decide(known, seen()).deletions
    assert (one.reason, one.drop, one.saves_an_hour) == ("r holds it and is silent", lease.holders, 2.5)


def test_of_two_holders_one_that_lives_is_enough():
    one = leases.ready(intended(holder=Holder("a", "a", (0,))), NOW)
    both = leases.take(one, Holder("b", "b", (1,)), NOW)
    assert left(facts(both, silent={"s": both.holders[:1]}), seen()) == {"s": "held by b"}


@pytest.mark.parametrize(
    ("q", "n"),
    [
        (QueuedResourceState.SUSPENDED, NodeState.PREEMPTED),
        (QueuedResourceState.SUSPENDED, None),
        (QueuedResourceState.FAILED, None),
        (None, NodeState.PREEMPTED),
        (ACTIVE, NodeState.TERMINATED),  # P1: preemptions have shown under other names
    ],
)
@pytest.mark.parametrize("settings", [{}, {"idle_minutes": 1e4}, {"min_slices": 1}])
def test_V3_the_dead_that_nobody_holds_are_deleted_also_in_a_pool_that_keeps_slices(q, n, settings):
    (one,) = decide(facts(free(), **settings), seen(q=q, n=n)).deletions
    assert one.dead
    assert one.saves_an_hour == 0.0


def test_an_unknown_state_is_not_death():
    assert list(left(facts(intended(created=NOW - 60)), seen(q=QueuedResourceState.UNKNOWN, n=None))) == ["s"]
    own = Candidate(ZONE, "v4-8", "on-demand")
    lease = dataclasses.replace(free(minutes=1), candidate=own)
    unsure = Sighting("s", ZONE, None, node("s", NodeState.UNKNOWN, spot=False))
    assert list(left(facts(lease, idle_minutes=10), unsure)) == ["s"]


def test_a_slice_whose_lease_is_gone_has_come_too_late_and_is_deleted():
    lease = leases.gone(free(), "idle", NOW)
    assert deleted(facts(lease), seen()) == {"s": "its lease says that it is gone (idle)"}


def test_a_quarantined_slice_goes_when_its_last_holder_has_left():
    sick = leases.quarantine(held(), "chips stay busy")
    assert left(facts(sick), seen()) == {"s": "held by r"}
    assert deleted(facts(leases.release(sick, "uid-r", NOW)), seen()) == {"s": "quarantined: chips stay busy"}


def test_what_is_kept_for_a_run_is_left_until_that_is_silent():
    claim = Claim("big", "big", 5, (0, 1, 2, 3))
    lease = leases.claim(free(minutes=30), claim, NOW)
    assert left(facts(lease), seen()) == {"s": "kept for big"}
    silent = facts(lease, silent={"s": (lease.claim,)} if lease.claim else {})
    (one,) = decide(silent, seen()).deletions
    assert one.drop == (lease.claim,)


# --- creations ---


def test_a_creation_in_flight_is_left_alone():
    waiting = seen(q=QueuedResourceState.WAITING_FOR_RESOURCES, n=None)
    maker = Holder("r", "uid-r", ())
    assert left(facts(intended(created=NOW - 4000, holder=maker)), waiting) == {"s": "held by r"}
    # Nobody holds it, and its intent is fresh.
    assert list(left(facts(intended(created=NOW - 60)), waiting)) == ["s"]
    assert decide(facts(intended(created=NOW - 60))).forgotten == ()


def test_a_creation_whose_maker_is_silent_is_given_up():
    lease = intended(holder=Holder("r", "uid-r", ()))
    known = facts(lease, silent={"s": lease.holders})
    waiting = seen(q=QueuedResourceState.WAITING_FOR_RESOURCES, n=None)
    (one,) = decide(known, waiting).deletions
    assert one.saves_an_hour == 0.0
    assert [one.lease.slice for one in decide(known).forgotten] == ["s"]


def test_a_creation_for_the_pool_is_left_while_the_pool_lacks_slices_and_not_for_ever():
    waiting = seen(q=QueuedResourceState.WAITING_FOR_RESOURCES, n=None)
    old = intended(created=NOW - 1000)
    assert list(deleted(facts(old), waiting)) == ["s"]
    assert left(facts(old, min_slices=1), waiting) == {"s": "on its way for the pool default"}
    assert list(deleted(facts(intended(created=NOW - 6000), min_slices=1), waiting)) == ["s"]


def test_a_creation_that_has_come_while_nobody_watched_is_in_the_pool_from_then_on():
    for age in (60, 1000, 6000):
        found = decide(facts(intended(created=NOW - age)), seen())
        assert [lease.slice for lease in found.arrived] == ["s"]
        assert found.deletions == ()
    # Not if the pool has it, or somebody holds it.
    assert decide(facts(free(minutes=1), idle_minutes=9), seen()).arrived == ()
    assert decide(facts(intended(holder=Holder("r", "r", ()))), seen()).arrived == ()


# --- the pool's size ---


def test_idle_slices_are_deleted_down_to_the_least_number_the_longest_idle_first():
    known = facts(free("a", 30), free("b", 60), free("c", 5), held("d"), idle_minutes=10, min_slices=3)
    found = [seen(name) for name in "abcd"]
    assert deleted(known, *found) == {"b": "idle for 60 min, kept for 10 (idle_minutes)"}
    assert left(known, *found)["c"] == "free for 5 of 10 min (idle_minutes)"
    assert left(known, *found)["a"] == "free, one of the 3 that the pool default keeps (min_slices)"


def test_the_dead_do_not_count_as_slices_that_the_pool_has():
    known = facts(free("a", 60), free("b", 60), idle_minutes=10, min_slices=1)
    found = decide(known, seen("a", n=NodeState.PREEMPTED), seen("b"))
    assert [one.sighting.name for one in found.deletions] == ["a"]


# --- no lease, a damaged lease, no slice ---


def test_what_no_lease_knows_is_deleted():
    (one,) = decide(facts(), seen()).deletions
    assert (one.reason, one.saves_an_hour) == ("no lease knows it", None)


@pytest.mark.parametrize("state", [READY, NodeState.PREEMPTED])
def test_a_driven_run_keeps_its_slice_also_without_a_lease(state):
    known = facts(drivers={"r": Driver.ALIVE})
    assert left(known, seen(n=state)) == {"s": "its run r is driven by a process that lives"}


def test_a_damaged_lease_is_a_persons_business_unless_the_slice_is_dead():
    known = facts(damaged={"s": "its lease is damaged"}, drivers={"r": Driver.SILENT})
    (one,) = decide(known, seen()).left
    assert one.doubtful
    assert list(deleted(known, seen(n=NodeState.PREEMPTED))) == ["s"]


def test_a_lease_of_a_slice_that_is_no_more_is_closed_but_not_where_the_cloud_did_not_answer():
    elsewhere = dataclasses.replace(free("b"), candidate=dataclasses.replace(SPOT, zone="us-east5-b"))
    found = decide(facts(free("a"), elsewhere, held("c")))
    assert [one.lease.slice for one in found.forgotten] == ["a"]


def test_whose_drivers_are_watched():
    other = {**OURS, RUN_LABEL: "r2"}
    known = facts(free("a"))
    assert runs_to_watch([seen("a", labels=other), seen("b")], known) == {"r"}


def test_queued_resources_and_nodes_are_joined_by_name_and_zone():
    elsewhere = dataclasses.replace(node("a"), zone="us-east5-b")
    joined = sightings([node("a"), elsewhere], [queued("a"), queued("b")])
    assert [(one.name, one.zone, bool(one.queued_resource), bool(one.node)) for one in joined] == [
        ("a", ZONE, True, True), ("b", ZONE, True, False), ("a", "us-east5-b", False, True),
    ]  # fmt: skip


# --- what holds for everything that can be seen ---

_labels = st.sampled_from(
    [
        OURS,
        {},
        {**ownership_labels("default", "bob", "r", "gs://other"), INTENT_LABEL: "1"},
        {k: v for k, v in OURS.items() if k != "relay-bucket"},
    ]
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Sighting], Facts]:
    found: list[Sighting] = []
    known: list[Lease] = []
    silent: dict[str, Collection[Holder | Claim]] = {}
    for name in "abcd":
        q = draw(st.sampled_from([None, *QueuedResourceState]))
        n = draw(st.sampled_from([None, *NodeState]))
        if q or n:
            found.append(seen(name, q, n, draw(_labels)))
        lease = draw(st.sampled_from(["none", "intended", "held", "free", "gone", "sick"]))
        made = {
            "intended": lambda name=name: intended(name, draw(st.sampled_from([NOW - 10, NOW - 1e4]))),
            "held": lambda name=name: held(name),
            "free": lambda name=name: free(name, draw(st.sampled_from([1.0, 100.0]))),
            "gone": lambda name=name: leases.gone(free(name), "w", NOW),
            "sick": lambda name=name: leases.quarantine(held(name), "w"),
        }.get(lease)
        if made is not None:
            known.append(one := made())
            if one.holders and draw(st.booleans()):
                silent[name] = one.holders
    settings = draw(st.sampled_from([{}, {"idle_minutes": 10}, {"min_slices": 2, "idle_minutes": 10}]))
    driver = draw(st.sampled_from(list(Driver)))
    return found, facts(*known, silent=silent, drivers={"r": driver}, **settings)


@given(worlds())
def test_every_slice_of_ours_is_either_deleted_or_left_with_a_reason_and_no_living_holder_loses_one(world):
    found, known = world
    made = plan(found, known, {ZONE})
    names = [one.sighting.name for one in made.deletions] + [one.name for one in made.left]
    assert len(names) + made.strangers == len(found)
    assert len(set(names)) == len(names)
    assert all(one.reason for one in [*made.deletions, *made.left, *made.forgotten])
    for one in made.deletions:
        assert one.sighting.labels.get("relay-bucket", "b") == "b"
        lease = known.leases.get(one.sighting.name)
        if lease is not None and lease.state is not LeaseState.GONE:
            assert set(lease.holders) <= set(one.drop)
    for gone in made.forgotten:
        assert set(gone.lease.holders) <= set(gone.drop)
    open_left = [
        lease
        for lease in known.leases.values()
        if lease.open and lease.slice not in {one.sighting.name for one in made.deletions}
    ]
    idle = [one for one in made.deletions if "idle_minutes" in one.reason]
    assert not idle or len(open_left) >= known.settings["default"].min_slices


def test_money_is_saved_only_by_what_costs_some():
    assert Deletion(seen(), "r", free()).saves_an_hour == 2.5
    assert Deletion(seen(n=None), "r", free()).saves_an_hour == 0.0
    assert Deletion(seen(), "r", free(), dead=True).saves_an_hour == 0.0
    assert Deletion(seen(), "r").saves_an_hour is None
