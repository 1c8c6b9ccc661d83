"""Every state of the cloud has a meaning, every signal an answer, every path of a slice an end."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tpu.cloud import (
    ErrorKind,
    Failure,
    Node,
    NodeHealth,
    NodeState,
    QueuedResource,
    QueuedResourceState,
)
from tpu.slices.candidate import Candidate
from tpu.slices.condition import Condition, Look, view
from tpu.slices.lease import (
    Holder,
    LeaseRefused,
    LeaseState,
    close,
    gone,
    intend,
    quarantine,
    ready,
    release,
    retire,
    take,
)
from tpu.slices.life import Effect, LifeState, Signal, alive, signal_of, step


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
    assert Effect.CLOSE in step(LifeState.READY, signal_of(seen))[1]


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


S, G, E = LifeState, Signal, Effect
GIVEN_UP = {S.CLOSING, S.DELETING, S.GONE}


def test_every_state_answers_every_signal() -> None:
    for state, signal in itertools.product(LifeState, Signal):
        after, effects = step(state, signal)
        assert after in LifeState
        assert len(set(effects)) == len(effects)


@pytest.mark.parametrize("state", LifeState)
def test_not_knowing_leads_to_nothing_but_another_look(state: LifeState) -> None:
    after, effects = step(state, G.UNSEEN)
    assert effects == ()
    assert alive(after) == alive(state)
    assert after not in (S.READY, S.COMING)
    assert after in (state, S.UNSURE, S.UNSURE_READY)


def test_only_a_closed_lease_leads_to_a_deletion_and_only_the_clouds_word_ends_it() -> None:
    for state, signal in itertools.product(LifeState, Signal):
        after, effects = step(state, signal)
        if E.DELETE in effects and state not in (S.DELETING, S.GONE):  # else its lease is closed already
            assert signal is G.LEASE_CLOSED
        if after is S.GONE and state is not S.GONE:
            assert (state, signal) == (S.DELETING, G.SEEN_GONE)
        # What is lost or done with never serves anybody again.
        if state in GIVEN_UP:
            assert after in GIVEN_UP
            assert E.NOTE_READY not in effects
        if not alive(state):
            assert not alive(after)


@pytest.mark.parametrize(
    ("state", "signal", "after", "effects"),
    [
        (S.INTENDED, G.INTENT_WRITTEN, S.INTENDED, (E.CREATE,)),
        (S.INTENDED, G.CREATION_REFUSED, S.CLOSING, (E.CLOSE,)),
        (S.INTENDED, G.SEEN_READY, S.READY, (E.NOTE_READY,)),  # made by an earlier life of ours
        (S.INTENDED, G.SEEN_GONE, S.CLOSING, (E.CLOSE,)),
        (S.COMING, G.SEEN_READY, S.READY, (E.NOTE_READY,)),
        (S.COMING, G.OVERDUE, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.UNSURE, G.OVERDUE, S.UNSURE, ()),  # V4: it may be ready, for all we know
        (S.READY, G.SEEN_READY, S.READY, ()),
        (S.READY, G.SEEN_RECOVERING, S.RECOVERING, ()),
        (S.READY, G.SEEN_LOST, S.CLOSING, (E.NOTE_LOSS, E.CLOSE)),
        (S.READY, G.SEEN_GONE, S.CLOSING, (E.NOTE_LOSS, E.CLOSE)),
        (S.READY, G.HOST_DROPPED, S.READY, (E.LOOK,)),
        (S.READY, G.HOST_NOTICED, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.READY, G.HOST_SICK, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.READY, G.ENDS_SOON, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.READY, G.UNWANTED, S.READY, (E.CLOSE_IF_FREE,)),
        (S.READY, G.LEASE_HELD, S.READY, ()),  # somebody was quicker, and wants it
        (S.READY, G.LEASE_CLOSED, S.DELETING, (E.DELETE,)),
        (S.RECOVERING, G.SEEN_READY, S.READY, (E.NOTE_READY,)),
        (S.RECOVERING, G.OVERDUE, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.UNSURE_READY, G.OVERDUE, S.UNSURE_READY, ()),
        (S.RETIRING, G.LEASE_HELD, S.RETIRING, ()),
        (S.RETIRING, G.LEASE_FREED, S.RETIRING, (E.BAR, E.CLOSE_IF_FREE)),
        (S.RETIRING, G.LEASE_CLOSED, S.DELETING, (E.DELETE,)),
        (S.CLOSING, G.LEASE_CLOSED, S.DELETING, (E.DELETE,)),
        (S.DELETING, G.SEEN_LOST, S.DELETING, ()),
        (S.DELETING, G.OVERDUE, S.DELETING, (E.DELETE,)),
        (S.DELETING, G.SEEN_READY, S.DELETING, (E.DELETE,)),
        (S.DELETING, G.SEEN_GONE, S.GONE, (E.NOTE_GONE,)),
        (S.GONE, G.SEEN_COMING, S.DELETING, (E.DELETE,)),  # a creation that arrived late
        (S.GONE, G.SEEN_GONE, S.GONE, ()),
    ],
)
def test_the_rows_that_matter_most(
    state: LifeState, signal: Signal, after: LifeState, effects: tuple[Effect, ...]
) -> None:
    assert step(state, signal) == (after, effects)


class Life:
    """A slice with its lease, of which runs take and give back chips while the table is carried out."""

    def __init__(self) -> None:
        self.lease = intend("s", "pool", Candidate("us-central2-b", "v4-8", "spot"), 4, "keeper", 0.0)
        self.state = S.INTENDED
        self.deletion_sent = False
        self.to_do: list[Effect] = []
        self.runs = itertools.count()

    def hear(self, signal: Signal) -> None:
        self.state, effects = step(self.state, signal)
        self.to_do += effects

    def do_one(self) -> None:
        """Carry out what has waited longest, with the real changes of a lease."""
        if not self.to_do:
            return
        effect = self.to_do.pop(0)
        match effect:
            case E.NOTE_READY:
                with contextlib.suppress(LeaseRefused):
                    self.lease = ready(self.lease, 0.0)
            case E.BAR:
                with contextlib.suppress(LeaseRefused):
                    self.lease = quarantine(self.lease, "sick")
            case E.CLOSE_IF_FREE:
                try:
                    self.lease = retire(self.lease, "unwanted")
                except LeaseRefused:
                    self.hear(G.LEASE_HELD)
                else:
                    self.hear(G.LEASE_CLOSED)
            case E.CLOSE:
                with contextlib.suppress(LeaseRefused):
                    self.lease = close(self.lease, "lost", 0.0)
                self.hear(G.LEASE_CLOSED)
            case E.DELETE:
                self.deletion_sent = True
            case E.NOTE_GONE:
                self.lease = gone(self.lease, "deleted", 0.0)
            case _:
                pass

    def take(self, chips: tuple[int, ...]) -> None:
        run = f"run-{next(self.runs)}"
        with contextlib.suppress(LeaseRefused):
            self.lease = take(self.lease, Holder(run, run, chips), 0.0)

    def release_first(self) -> None:
        if self.lease.holders:
            self.lease = release(self.lease, self.lease.holders[0].uid, 0.0)
            if not self.lease.holders:
                self.hear(G.LEASE_FREED)

    def never_leased_and_deleted(self) -> None:
        if self.deletion_sent:
            assert not self.lease.holders
            assert not self.lease.open


class LifeMachine(RuleBasedStateMachine):
    """Any order of what the cloud, the hosts, the runs, the clock and a slow keeper do."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()

    # The answers about the lease come of what is done, not out of the blue.
    @rule(signal=st.sampled_from([g for g in Signal if not g.name.startswith("LEASE_")]))
    def hear(self, signal: Signal) -> None:
        self.life.hear(signal)

    @rule()
    def do_one(self) -> None:
        self.life.do_one()

    @rule(chips=st.sampled_from([(0,), (1, 2), (0, 1, 2, 3)]))
    def take(self, chips: tuple[int, ...]) -> None:
        self.life.take(chips)

    @rule()
    def release_first(self) -> None:
        self.life.release_first()

    @invariant()
    def never_leased_and_deleted(self) -> None:
        self.life.never_leased_and_deleted()

    def teardown(self) -> None:
        """Nothing is forgotten: once it is unwanted and let go, the cloud is asked, and its word ends it."""
        life = self.life
        while life.lease.holders:
            life.release_first()
        life.hear(G.UNWANTED)
        while life.to_do:
            life.do_one()
        assert life.state in (S.DELETING, S.GONE)
        assert life.deletion_sent
        life.hear(G.SEEN_GONE)
        while life.to_do:
            life.do_one()
        assert life.state is S.GONE
        assert life.lease.state is LeaseState.GONE
        life.never_leased_and_deleted()


TestLifeAndLease = LifeMachine.TestCase
TestLifeAndLease.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
