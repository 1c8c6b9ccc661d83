"""Every state of the cloud has a meaning, every signal an answer, every path of a slice an end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu.cloud import (
    ErrorKind,
    Failure,
    Node,
    NodeHealth,
    NodeState,
    QueuedResource,
    QueuedResourceState,
)
from tpu.slices.condition import Condition, Look, view
from tpu.slices.life import Effect, LifeState, Signal, signal_of, step, was_ready


def a_node(state: NodeState, health: NodeHealth = NodeHealth.HEALTHY, spot: bool = True) -> Node:
    return Node(
        name="s",
        zone="us-central2-b",
        state=state,
        health=health,
        accelerator_type="v4-8",
        runtime_version="tpu-ubuntu2204-base",
        endpoints=(),
        spot=spot,
        reserved=False,
        queued_resource="s",
    )


def a_queued_resource(
    state: QueuedResourceState, spot: bool = True, by_user: bool = False, failure: Failure | None = None
) -> QueuedResource:
    return QueuedResource(
        name="s",
        zone="us-central2-b",
        state=state,
        accelerator_type="v4-8",
        node_names=("s",),
        spot=spot,
        by_user=by_user,
        failure=failure,
    )


ACTIVE = a_queued_resource(QueuedResourceState.ACTIVE)
C, N, Q = Condition, NodeState, QueuedResourceState


@pytest.mark.parametrize("state", [state for state in NodeState if state is not NodeState.READY])
def test_P1_a_spot_node_that_was_ready_and_shows_anything_else_is_lost(state: NodeState) -> None:
    seen = view(Look(ACTIVE, a_node(state), spot=True, was_ready=True))
    assert seen.condition is Condition.LOST
    assert seen.preempted
    assert state.name in seen.reason
    assert Effect.DELETE in step(LifeState.READY, signal_of(seen))[1]


def test_P1_a_spot_node_that_is_gone_is_lost_too() -> None:
    node_gone = view(Look(ACTIVE, None, spot=True, was_ready=True))
    assert (node_gone.condition, node_gone.preempted) == (Condition.LOST, True)
    all_gone = view(Look(None, None, spot=True, was_ready=True))
    assert (all_gone.condition, all_gone.preempted, all_gone.gone) == (Condition.LOST, True, True)


# What an on-demand node's states mean, before and after it has been ready.
ON_DEMAND = [
    (N.CREATING, C.COMING, C.RECOVERING),
    (N.READY, C.READY_HEALTHY, C.READY_HEALTHY),
    (N.RESTARTING, C.RECOVERING, C.RECOVERING),
    (N.REIMAGING, C.RECOVERING, C.RECOVERING),
    (N.DELETING, C.LOST, C.LOST),
    (N.REPAIRING, C.RECOVERING, C.RECOVERING),
    (N.STOPPED, C.LOST, C.LOST),
    (N.STOPPING, C.LOST, C.LOST),
    (N.STARTING, C.COMING, C.RECOVERING),
    (N.PREEMPTED, C.LOST, C.LOST),
    (N.TERMINATED, C.LOST, C.LOST),
    (N.HIDING, C.RECOVERING, C.RECOVERING),
    (N.HIDDEN, C.RECOVERING, C.RECOVERING),
    (N.UNHIDING, C.RECOVERING, C.RECOVERING),
    (N.UNKNOWN, C.UNKNOWN, C.UNKNOWN),
]


def test_the_on_demand_table_is_complete() -> None:
    assert {row[0] for row in ON_DEMAND} == set(NodeState)


@pytest.mark.parametrize(("state", "before", "after"), ON_DEMAND)
def test_an_on_demand_node(state: NodeState, before: Condition, after: Condition) -> None:
    queued = a_queued_resource(Q.ACTIVE, spot=False)
    node = a_node(state, spot=False)
    assert view(Look(queued, node, spot=False, was_ready=False)).condition is before
    assert view(Look(queued, node, spot=False, was_ready=True)).condition is after


@pytest.mark.parametrize(
    ("state", "condition"),
    [
        (N.CREATING, C.COMING),
        (N.STARTING, C.COMING),
        (N.READY, C.READY_HEALTHY),
        (N.UNKNOWN, C.UNKNOWN),
        *[(s, C.LOST) for s in N if s not in (N.CREATING, N.STARTING, N.READY, N.UNKNOWN)],
    ],
)
def test_a_spot_node_on_its_way(state: NodeState, condition: Condition) -> None:
    assert view(Look(ACTIVE, a_node(state), spot=True, was_ready=False)).condition is condition


@pytest.mark.parametrize(
    ("state", "before", "after"),
    [
        (Q.UNKNOWN, C.UNKNOWN, C.LOST),
        (Q.CREATING, C.COMING, C.LOST),
        (Q.ACCEPTED, C.COMING, C.LOST),
        (Q.WAITING_FOR_RESOURCES, C.COMING, C.LOST),
        (Q.PROVISIONING, C.COMING, C.LOST),
        (Q.ACTIVE, C.COMING, C.LOST),
        (Q.FAILED, C.LOST, C.LOST),
        (Q.DELETING, C.LOST, C.LOST),
        (Q.SUSPENDING, C.LOST, C.LOST),
        (Q.SUSPENDED, C.LOST, C.LOST),
    ],
)
def test_a_queued_resource_without_node(
    state: QueuedResourceState, before: Condition, after: Condition
) -> None:
    queued = a_queued_resource(state)
    assert view(Look(queued, None, spot=True, was_ready=False)).condition is before
    assert view(Look(queued, None, spot=True, was_ready=True)).condition is after


@pytest.mark.parametrize("state", [Q.FAILED, Q.DELETING, Q.SUSPENDING, Q.SUSPENDED])
def test_an_ended_queued_resource_outranks_a_node_that_still_looks_ready(state: QueuedResourceState) -> None:
    seen = view(Look(a_queued_resource(state), a_node(N.READY), spot=True, was_ready=True))
    assert seen.condition is Condition.LOST


@pytest.mark.parametrize("state", [Q.ACCEPTED, Q.WAITING_FOR_RESOURCES, Q.PROVISIONING, Q.UNKNOWN])
def test_a_new_slice_is_ready_only_when_queued_resource_and_node_say_so(state: QueuedResourceState) -> None:
    assert view(Look(a_queued_resource(state), a_node(N.READY), True, was_ready=False)).condition is C.COMING
    assert view(Look(ACTIVE, a_node(N.READY), True, was_ready=False)).usable


def test_a_failure_is_told_in_the_clouds_words() -> None:
    failure = Failure(ErrorKind.STOCKOUT, 8, "There is no more capacity in the zone")
    seen = view(Look(a_queued_resource(Q.FAILED, failure=failure), None, spot=True, was_ready=False))
    assert failure.message in seen.reason
    assert not seen.preempted


@pytest.mark.parametrize("state", [Q.DELETING, Q.SUSPENDING, Q.SUSPENDED])
def test_what_a_user_did_is_no_preemption(state: QueuedResourceState) -> None:
    assert view(Look(a_queued_resource(state), None, True, True)).preempted
    assert not view(Look(a_queued_resource(state, by_user=True), None, True, True)).preempted


@pytest.mark.parametrize(
    ("health", "spot", "on_demand"),
    [
        (NodeHealth.HEALTHY, C.READY_HEALTHY, C.READY_HEALTHY),
        (NodeHealth.UNREPORTED, C.READY_HEALTHY, C.READY_HEALTHY),
        (NodeHealth.TIMEOUT, C.LOST, C.RECOVERING),
        (NodeHealth.UNHEALTHY_TENSORFLOW, C.LOST, C.RECOVERING),
        (NodeHealth.UNHEALTHY_MAINTENANCE, C.LOST, C.RECOVERING),
        (NodeHealth.UNKNOWN, C.UNKNOWN, C.UNKNOWN),
    ],
)
def test_the_health_of_a_ready_node(health: NodeHealth, spot: Condition, on_demand: Condition) -> None:
    node = a_node(N.READY, health)
    assert view(Look(ACTIVE, node, spot=True, was_ready=True)).condition is spot
    assert view(Look(ACTIVE, node, spot=False, was_ready=True)).condition is on_demand


looks = st.builds(
    Look,
    st.one_of(
        st.none(),
        st.builds(a_queued_resource, st.sampled_from(QueuedResourceState), st.booleans(), st.booleans()),
    ),
    st.one_of(
        st.none(), st.builds(a_node, st.sampled_from(NodeState), st.sampled_from(NodeHealth), st.booleans())
    ),
    st.booleans(),
    st.booleans(),
)


@given(look=looks)
def test_every_look_has_a_meaning_and_a_sentence(look: Look) -> None:
    seen = view(look)
    assert seen.reason
    assert signal_of(seen) in Signal
    if seen.usable:
        assert look.node is not None
        assert look.node.state is NodeState.READY
    assert seen.gone == (look.queued_resource is None and look.node is None)


def test_every_state_answers_every_signal() -> None:
    for state, signal in itertools.product(LifeState, Signal):
        after, effects = step(state, signal)
        assert after in LifeState
        assert len(set(effects)) == len(effects)


signals = st.lists(st.sampled_from(Signal), max_size=60)


@given(history=signals)
def test_no_slice_is_forgotten_every_path_ends_in_a_confirmed_deletion(history: list[Signal]) -> None:
    state = LifeState.INTENDED
    for signal in history:
        state, _ = step(state, signal)
    released, _ = step(state, Signal.RELEASED)
    # If it is released, only the cloud's word that it is gone ends the deletion, whatever comes before.
    assert released in (LifeState.DELETING, LifeState.GONE)
    for signal in history:
        state_before, released = released, step(released, signal)[0]
        assert released in (LifeState.DELETING, LifeState.GONE)
        if released is LifeState.GONE and state_before is not LifeState.GONE:
            assert signal is Signal.SEEN_GONE
    assert step(released, Signal.SEEN_GONE)[0] is LifeState.GONE


@given(history=signals)
def test_nobody_gets_a_slice_that_is_being_deleted(history: list[Signal]) -> None:
    state = LifeState.INTENDED
    ended = False
    for signal in history:
        before, (state, effects) = state, step(state, signal)
        ended = ended or before in (LifeState.DELETING, LifeState.GONE)
        if ended:
            assert Effect.ANNOUNCE_READY not in effects
            assert state in (LifeState.DELETING, LifeState.GONE)
        if (
            was_ready(before)
            and state in (LifeState.DELETING, LifeState.GONE)
            and signal is not Signal.RELEASED
        ):
            assert Effect.ANNOUNCE_LOSS in effects


@given(state=st.sampled_from(LifeState))
def test_not_knowing_leads_to_nothing_but_another_look(state: LifeState) -> None:
    after, effects = step(state, Signal.UNSEEN)
    assert effects == ()
    assert was_ready(after) == was_ready(state)
    assert after not in (LifeState.READY, LifeState.COMING)
    assert (after is LifeState.GONE) == (state is LifeState.GONE)


@given(
    state=st.sampled_from(LifeState), signal=st.sampled_from([s for s in Signal if s.name.startswith("SEEN")])
)
def test_what_shows_under_a_deleted_name_is_deleted_again(state: LifeState, signal: Signal) -> None:
    if state in (LifeState.DELETING, LifeState.GONE) and signal is not Signal.SEEN_GONE:
        assert step(state, signal) == (LifeState.DELETING, (Effect.DELETE,))
