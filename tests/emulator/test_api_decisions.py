"""The decisions of the emulated cloud as tables: no server, no clock, no processes."""

from __future__ import annotations

import itertools

import pytest

from tpu.emulator import checks, messages
from tpu.emulator.addresses import AddressPool
from tpu.emulator.capacity import (
    Ask,
    CreationBudget,
    Limits,
    Placed,
    Provisioning,
    Refused,
    Usage,
    Wait,
    admit,
    place,
)
from tpu.emulator.errors import ApiError, code_number
from tpu.emulator.faults import Faults
from tpu.emulator.names import Location, check_id, parse_location, parse_resource
from tpu.emulator.schedule import Schedule, strikes
from tpu.topology import accelerator_type

ZONE = "us-central2-b"
WHERE = (ZONE, "v4-8")
LOCATION = Location("p", ZONE)


def ask(provisioning: Provisioning = "spot", slices: int = 1) -> Ask:
    return Ask(ZONE, accelerator_type("v4-8"), provisioning, slices)


@pytest.mark.parametrize(
    ("limits", "usage", "slices", "text"),
    [
        (Limits(), Usage(100, 100), 1, None),
        (Limits(quota={WHERE: 2}), Usage(1, 0), 1, None),
        (Limits(quota={WHERE: 2}), Usage(1, 0), 2, "exhausted. Limit 2 in zone us-central2-b"),
        (Limits(quota={WHERE: 2}), Usage(2, 0), 1, "'TPUV4sPreemptiblePerProjectPerRegionForTPUAPI'"),
        (Limits(quota={WHERE: 0}), Usage(), 1, "has been exceeded. Limit: 0 in region us-central2."),
        (Limits(quota={("us-central1-a", "v4-8"): 0}), Usage(), 1, None),
    ],
)
def test_quota_counts_all_that_is_not_deleted(limits, usage, slices, text):
    decision = admit(limits, ask(slices=slices), usage)
    if text is None:
        assert decision == Placed()
    else:
        assert isinstance(decision, Refused)
        assert decision.error.code == 8
        assert text in decision.error.message


@pytest.mark.parametrize(
    ("limits", "usage", "wanted", "expected"),
    [
        (Limits(), Usage(9, 9), ask(), Placed),
        (Limits(capacity={WHERE: 1}), Usage(5, 0), ask(), Placed),
        (Limits(capacity={WHERE: 1}), Usage(1, 1), ask(), Wait),
        (Limits(capacity={WHERE: 2}), Usage(1, 1), ask(slices=2), Wait),
        (Limits(capacity={WHERE: 0}), Usage(), ask(), Wait),
        (Limits(stockouts=frozenset({WHERE})), Usage(), ask(), Refused),
        (Limits(reservation={WHERE: 1}), Usage(1, 1, 1), ask("reserved"), Refused),
        (Limits(reservation={WHERE: 1}), Usage(1, 1, 1), ask("on-demand"), Placed),
    ],
)
def test_capacity_counts_what_has_its_hosts(limits, usage, wanted, expected):
    assert isinstance(place(limits, wanted, usage), expected)


def test_limits_change_by_value():
    limits = Limits().with_number("capacity", WHERE, 3).with_stockout(WHERE, True)
    assert limits.capacity == {WHERE: 3}
    assert limits.with_number("capacity", WHERE, None).capacity == {}
    assert limits.with_stockout(WHERE, False).stockouts == frozenset()
    with pytest.raises(ValueError, match="0 or more"):
        limits.with_number("quota", WHERE, -1)


def test_creations_are_granted_91_a_minute():
    budget, granted = CreationBudget(91, at=0.0), 0
    for _ in range(200):
        budget, ok = budget.spend(now=0.0, per_minute=91)
        granted += ok
    assert granted == 91
    budget, ok = budget.spend(now=0.5, per_minute=91)
    assert not ok
    budget, ok = budget.spend(now=0.7, per_minute=91)
    assert ok
    _, ok = budget.spend(now=1000.0, per_minute=91, count=92)
    assert not ok


def test_a_schedule_is_the_same_for_the_same_seed():
    first = list(itertools.islice(strikes(Schedule(seed=3, mean_s=10)), 50))
    assert first == list(itertools.islice(strikes(Schedule(seed=3, mean_s=10)), 50))
    assert first != list(itertools.islice(strikes(Schedule(seed=4, mean_s=10)), 50))
    assert 5 < sum(strike.wait_s for strike in first) / 50 < 20
    assert not any(strike.notice for strike in first)


def test_a_schedule_picks_whatever_order_the_nodes_come_in():
    strike = next(strikes(Schedule(seed=0, mean_s=1)))
    assert strike.pick([]) is None
    assert strike.pick(["b", "a", "c"]) == strike.pick(["c", "b", "a"])


def test_a_schedule_alternates_notice_and_ends_with_its_count():
    planned = list(strikes(Schedule(seed=0, mean_s=1, notice="alternate", count=4)))
    assert [strike.notice for strike in planned] == [False, True, False, True]
    with pytest.raises(ValueError, match="mean_s"):
        Schedule(seed=0, mean_s=0)
    with pytest.raises(ValueError, match="count"):
        Schedule(seed=0, mean_s=1, count=0)


@pytest.mark.parametrize("good", ["a", "a1", "my-node-3", "a" * 63])
def test_good_ids(good):
    check_id("node_id", good)


@pytest.mark.parametrize("bad", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "a" * 64, "a\n", "ä"])
def test_bad_ids(bad):
    with pytest.raises(ApiError) as caught:
        check_id("node_id", bad)
    assert caught.value.code == 3


def test_names_are_read_and_malformed_ones_refused():
    assert parse_location("projects/p/locations/z") == Location("p", "z")
    assert parse_resource("projects/p/locations/z/nodes/n", "nodes") == (Location("p", "z"), "n")
    for bad in ("", "projects/p", "projects/p/locations/z/nodes/n/x", "projects/p/locations/z/things/n"):
        with pytest.raises(ApiError, match="Malformed"):
            parse_resource(bad, "nodes")


@pytest.mark.parametrize(
    ("verb", "served"),
    [
        ("update", {"READY", "STOPPED"}),
        ("stop", {"READY"}),
        ("start", {"STOPPED"}),
        ("getGuestAttributes", {"READY", "RESTARTING", "REPAIRING", "STOPPING", "STARTING"}),
    ],
)
def test_requests_are_served_in_their_states_only(verb, served):
    for state in messages.NodeState.__members__:
        if state in served:
            checks.check_state(verb, state)
        else:
            with pytest.raises(ApiError) as caught:
                checks.check_state(verb, state)
            assert caught.value.code == 3
            assert f"{verb} is not supported while in state {state}" in caught.value.message


@pytest.mark.parametrize(
    ("state", "nodes", "force", "deletable"),
    [
        ("WAITING_FOR_RESOURCES", [], False, True),
        ("FAILED", [], False, True),
        ("SUSPENDED", ["n"], False, True),
        ("ACTIVE", ["n"], False, False),
        ("ACTIVE", [], False, True),
        ("ACTIVE", ["n"], True, True),
        ("PROVISIONING", ["n"], False, False),
        ("PROVISIONING", ["n"], True, True),
        ("SUSPENDING", ["n"], False, False),
        ("DELETING", [], True, False),
    ],
)
def test_when_a_queued_resource_can_be_deleted(state, nodes, force, deletable):
    if deletable:
        checks.check_queued_deletable(state, nodes, force=force)
    else:
        with pytest.raises(ApiError) as caught:
            checks.check_queued_deletable(state, nodes, force=force)
        assert caught.value.code == 9


def node(**fields):
    return messages.Node(**{"accelerator_type": "v4-8", "runtime_version": "tpu-ubuntu2204-base", **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"accelerator_type": ""}, "accelerator_type must be set"),
        ({"accelerator_type": "v6e-8"}, 'accelerator type, "v6e-8", could not be found in zone'),
        ({"accelerator_type": "v4-9"}, 'accelerator type, "v4-9", could not be found in zone'),
        ({"runtime_version": ""}, "runtime_version must be set"),
        ({"runtime_version": "v2-alpha-tpuv6e"}, "runtime version 'v2-alpha-tpuv6e' could not be found"),
        ({"labels": {"Upper": "x"}}, "Invalid label 'Upper=x'"),
        ({"labels": {"ok": "x" * 64}}, "Invalid label"),
        ({"labels": {"a" * 64: "x"}}, "Invalid label"),
        ({"labels": {f"k{i}": "" for i in range(65)}}, "At most 64 labels"),
        ({"metadata": {"startup-script": "x" * (256 * 1024 + 1)}}, "'startup-script' is too large"),
        ({"metadata": {"a": "x" * (512 * 1024)}}, "Metadata is too large"),
        ({"scheduling_config": {"spot": True, "reserved": True}}, "one of spot, preemptible and reserved"),
    ],
)
def test_bad_nodes_are_refused(fields, text):
    with pytest.raises(ApiError) as caught:
        checks.check_node(node(**fields), ZONE)
    assert caught.value.code == 3
    assert text in caught.value.message
    assert caught.value.message.startswith("Cloud TPU received a bad request. ")


def test_a_node_can_be_asked_for_by_topology():
    wanted = node(accelerator_type="", accelerator_config={"type_": 7, "topology": "2x2x2"})
    assert checks.check_node(wanted, ZONE).name == "v4-16"
    wanted.accelerator_config.topology = "3x3x3"
    with pytest.raises(ApiError, match="could not be found"):
        checks.check_node(wanted, ZONE)


def queued(*specs, **fields):
    return messages.QueuedResource(tpu={"node_spec": list(specs)}, **fields)


def test_a_queued_resource_of_several_nodes_names_them_by_prefix():
    wanted = queued({"multi_node_params": {"node_count": 3, "node_id_prefix": "s"}, "node": node()}, spot={})
    asked, ids = checks.check_queued(wanted, LOCATION)
    assert ids == ("s-0", "s-1", "s-2")
    assert (asked.slices, asked.provisioning) == (3, "spot")


@pytest.mark.parametrize(
    ("fields", "provisioning"),
    [({}, "on-demand"), ({"spot": {}}, "spot"), ({"best_effort": {}}, "preemptible"),
     ({"guaranteed": {}}, "on-demand"), ({"guaranteed": {"reserved": True}}, "reserved")],
)  # fmt: skip
def test_tiers(fields, provisioning):
    asked, _ = checks.check_queued(queued({"node_id": "n", "node": node()}, **fields), LOCATION)
    assert asked.provisioning == provisioning


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (queued(), "exactly one entry"),
        (queued({"node_id": "n", "node": node()}, {"node_id": "m", "node": node()}), "exactly one entry"),
        (queued({"node_id": "n", "parent": "projects/p/locations/x", "node": node()}), "differs from"),
        (queued({"node_id": "N", "node": node()}), "Invalid node_id 'N'"),
        (queued({"node": node()}), "Invalid node_id ''"),
        (queued({"multi_node_params": {"node_count": 1, "node_id_prefix": "s"}, "node": node()}), "from 2"),
        (queued({"multi_node_params": {"node_count": 2}, "node": node()}), "node_id_prefix must be set"),
        (
            queued({"node_id": "n", "multi_node_params": {"node_count": 2}, "node": node()}),
            "node_id or multi_node_params",
        ),
        (
            queued({"node_id": "n", "node": node(scheduling_config={"spot": True})}, guaranteed={}),
            "contradicts the tier",
        ),
    ],
)
def test_bad_queued_resources_are_refused(wanted, text):
    with pytest.raises(ApiError) as caught:
        checks.check_queued(wanted, LOCATION)
    assert caught.value.code == 3
    assert text in caught.value.message


def test_pages_cover_everything_once():
    names = [f"n{i:03}" for i in range(25)]
    seen, token = [], ""
    while True:
        part, token = checks.page(names, 10, token)
        seen += part
        if not token:
            break
    assert seen == names
    assert checks.page([], 0, "") == ([], "")
    assert len(checks.page([str(i) for i in range(3000)], 5000, "")[0]) == 1000
    with pytest.raises(ApiError, match="page_size"):
        checks.page(names, -1, "")
    with pytest.raises(ApiError, match="page_token"):
        checks.page(names, 1, "no token")


def test_request_ids_are_uuids():
    checks.check_request_id("")
    checks.check_request_id("a3a0b3a8-7b0c-4f4e-8b7b-3d6c8b1f9d10")
    with pytest.raises(ApiError, match="UUID"):
        checks.check_request_id("again")


def test_faults_are_used_up_in_order():
    faults = Faults()
    faults.add("GetNode", ApiError(14, "away"), times=2)
    faults.add("*", ApiError(13, "broken"), times=1, after=True)
    taken = [faults.take(method) for method in ("GetNode", "ListNodes", "GetNode", "GetNode")]
    assert [fault and (fault.error.message, fault.after) for fault in taken] == [
        ("away", False), ("broken", True), ("away", False), None
    ]  # fmt: skip


def test_status_codes_by_name_and_number():
    assert code_number("UNAVAILABLE") == code_number(14) == code_number("14") == 14
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        code_number("NO_SUCH")
    with pytest.raises(ValueError, match="unknown status code"):
        code_number(0)


def test_address_pools_never_share_a_network():
    pools = [AddressPool.claim() for _ in range(5)]
    try:
        assert len({pool.network for pool in pools}) == 5
        first, second = pools[0].take(), pools[0].take()
        assert first != second
        pools[0].free(first)
        assert pools[0].take() not in (first, second)  # as late as possible
    finally:
        for pool in pools:
            pool.close()
