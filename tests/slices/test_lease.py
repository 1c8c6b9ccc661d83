"""Leases: what each change allows, and that no interleaving of actors gives a chip to two or forgets a slice."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tpu.checkpoint.objects import StaleGeneration
from tpu.slices.candidate import Candidate
from tpu.slices.lease import (
    LEASE_TTL_S,
    LONGEST_GAP_S,
    Claim,
    Holder,
    Lease,
    LeaseObserver,
    LeaseRefused,
    LeaseState,
    MalformedLease,
    Span,
    claim,
    drop,
    from_json,
    gone,
    idle_chip_seconds,
    intend,
    quarantine,
    ready,
    release,
    renew,
    renew_claim,
    retire,
    take,
    to_json,
    unclaim,
    used_chip_seconds,
)
from tpu.slices.lease_book import Kept, LeaseExists, MemoryLeaseBook

V4 = Candidate("us-central2-b", "v4-8", "spot", 3.22)
T = TypeVar("T")


def holder(run: str, *chips: int, priority: int = 0) -> Holder:
    return Holder(run, f"uid-{run}", chips, priority)


def ready_lease(*holders: Holder, chips: int = 4) -> Lease:
    lease = ready(intend("s", "p", V4, chips, "uid-maker", 0.0), 100.0)
    for one in holders:
        lease = take(lease, one, 100.0)
    return lease


def test_a_chip_that_is_held_is_refused_and_the_holder_is_named():
    lease = ready_lease(holder("a", 0, 1))
    with pytest.raises(LeaseRefused, match="a holds chips 0,1"):
        take(lease, holder("b", 1, 2), 101.0)
    assert take(lease, holder("b", 2, 3), 101.0).free_chips == ()


def test_chips_that_a_slice_does_not_have_are_refused():
    with pytest.raises(LeaseRefused, match="chips 0 to 3"):
        take(ready_lease(), holder("a", 4), 101.0)
    with pytest.raises(LeaseRefused, match="chips 0 to 3"):
        take(ready_lease(), holder("a", 1, 1), 101.0)


def test_each_take_has_a_higher_term_and_an_old_term_renews_nothing():
    lease = ready_lease(holder("a", 0))
    first = lease.holders[0]
    lease = take(release(lease, "uid-a", 110.0), holder("a", 0), 120.0)
    assert lease.holders[0].term == first.term + 1
    with pytest.raises(LeaseRefused, match="lost: a holds chips 0"):
        renew(lease, "uid-a", first.term, 121.0)
    assert renew(lease, "uid-a", first.term + 1, 121.0).holders[0].beat == 1


@pytest.mark.parametrize("end", [lambda s: quarantine(s, "ill"), lambda s: gone(s, "deleted", 150.0)])
def test_a_slice_that_is_quarantined_or_gone_is_neither_taken_nor_claimed(end):
    lease = end(ready_lease())
    with pytest.raises(LeaseRefused):
        take(lease, holder("a", 0), 160.0)
    with pytest.raises(LeaseRefused):
        claim(lease, Claim("a", "uid-a", 5, (0,)), 160.0)


def test_a_slice_that_somebody_holds_is_not_retired_and_not_gone_by_anothers_word():
    lease = ready_lease(holder("a", 0), holder("b", 1))
    with pytest.raises(LeaseRefused, match="held by b"):
        retire(lease, "idle", by="uid-a")
    with pytest.raises(LeaseRefused, match="held by a, b"):
        gone(lease, "deleted", 200.0)
    alone = release(lease, "uid-b", 200.0)
    assert retire(alone, "its run is over", by="uid-a").state is LeaseState.QUARANTINED


def test_a_slice_that_the_cloud_took_is_gone_under_all_holders():
    lease = gone(ready_lease(holder("a", 0), holder("b", 1)), "preempted", 200.0, lost=True)
    assert lease.holders == ()
    assert lease.spans[-2:] == (Span("a", (0,), 100.0, 200.0), Span("b", (1,), 100.0, 200.0))


def test_quarantine_lets_holders_go_on_and_keeps_the_first_reason():
    lease = quarantine(quarantine(ready_lease(holder("a", 0)), "chips busy"), "other")
    assert renew(lease, "uid-a", lease.holders[0].term, 3.0).why == "chips busy"
    assert gone(lease, "deleted", 4.0, by="uid-a").why == "chips busy"


def test_claimed_chips_are_for_the_claimer_and_lent_to_lower_priorities_until_due():
    waiting = claim(ready_lease(), Claim("big", "uid-big", 5, (0, 1, 2, 3)), 150.0)
    with pytest.raises(LeaseRefused, match="claimed by big"):
        take(waiting, holder("equal", 0, priority=5), 151.0)
    lent = take(waiting, holder("small", 0, priority=4), 151.0)
    due = claim(lent, Claim("big", "uid-big", 5, (0, 1, 2, 3), due=True), 152.0)
    with pytest.raises(LeaseRefused, match="claimed by big"):
        take(due, holder("late", 1), 153.0)
    with pytest.raises(LeaseRefused, match="small holds"):
        take(due, holder("big", 0, 1, 2, 3, priority=5), 153.0)
    taken = take(release(due, "uid-small", 154.0), holder("big", 0, 1, 2, 3, priority=5), 155.0)
    assert taken.claim is None


def test_nobody_of_the_same_or_a_higher_priority_is_evicted():
    lease = ready_lease(holder("a", 0, priority=5))
    with pytest.raises(LeaseRefused, match="is not evicted"):
        claim(lease, Claim("b", "uid-b", 5, (0,), due=True), 150.0)
    assert claim(lease, Claim("b", "uid-b", 5, (1, 2), due=True), 150.0).claim


def test_a_claim_gives_way_to_a_more_important_one_only():
    lease = claim(ready_lease(), Claim("a", "uid-a", 1, (0,)), 150.0)
    with pytest.raises(LeaseRefused, match="a has claimed it"):
        claim(lease, Claim("b", "uid-b", 1, (0,)), 151.0)
    taken_over = claim(lease, Claim("b", "uid-b", 2, (0,)), 151.0)
    with pytest.raises(LeaseRefused, match="is lost"):
        renew_claim(taken_over, "uid-a")
    assert unclaim(taken_over, "uid-a") == taken_over
    assert unclaim(taken_over, "uid-b").claim is None


def test_a_holder_expires_after_its_ttl_on_the_observers_clock_and_not_if_it_beats():
    observer, lease = LeaseObserver(), ready_lease(holder("a", 0), holder("b", 1))
    for second in range(0, int(LEASE_TTL_S), 10):
        lease = renew(lease, "uid-b", 2, second)
        assert observer.see(lease, float(second)) == ()
    assert observer.see(renew(lease, "uid-b", 2, 60.0), LEASE_TTL_S) == (lease.holders[0],)


def test_who_did_not_look_for_long_begins_to_count_anew():
    observer, lease = LeaseObserver(), ready_lease(holder("a", 0))
    assert observer.see(lease, 0.0) == ()
    assert observer.see(lease, LEASE_TTL_S * 5) == ()
    at = LEASE_TTL_S * 5
    while at < LEASE_TTL_S * 6:
        at += LONGEST_GAP_S
        seen = observer.see(lease, at)
    assert seen == lease.holders


def test_a_holder_that_beat_meanwhile_is_not_dropped():
    lease = ready_lease(holder("a", 0))
    silent = lease.holders[0]
    with pytest.raises(LeaseRefused, match="renewed"):
        drop(renew(lease, "uid-a", silent.term, 161.0), silent, 162.0)
    assert drop(lease, silent, 162.0).free_since == 162.0


def test_a_claimer_expires_like_a_holder():
    observer, lease = LeaseObserver(30.0), claim(ready_lease(), Claim("a", "uid-a", 1, (0,)), 0.0)
    assert observer.see(lease, 0.0) == ()
    assert observer.see(renew_claim(lease, "uid-a"), 30.0) == ()
    assert lease.claim is not None
    assert observer.see(renew_claim(lease, "uid-a"), 60.0) == (replace(lease.claim, beat=1),)
    with pytest.raises(LeaseRefused, match="renewed"):
        drop(renew_claim(lease, "uid-a"), lease.claim, 61.0)
    assert drop(lease, lease.claim, 61.0).claim is None


def test_used_and_idle_seconds_sum_to_the_life_of_all_chips_also_when_old_spans_are_folded():
    lease, now = ready_lease(), 100.0
    for number in range(500):
        lease = take(lease, holder(f"r{number}", 0, 2), now + 1)
        lease = release(lease, f"uid-r{number}", now + 4)
        now += 5
    lease = gone(lease, "idle", now)
    assert len(lease.spans) <= 400
    assert sum(used_chip_seconds(lease, now + 99).values()) == 500 * 3 * 2
    assert idle_chip_seconds(lease, now + 99) == 500 * 5 * 4 - 500 * 3 * 2


def test_a_lease_is_read_as_it_was_written_and_damage_is_named():
    lease = claim(ready_lease(holder("a", 0)), Claim("b", "uid-b", 2, (1, 2)), 1.0)
    assert from_json(to_json(gone(lease, "x", 2.0, lost=True))) == gone(lease, "x", 2.0, lost=True)
    assert from_json(to_json(lease)) == lease
    for damaged in (b"", b"[]", to_json(lease)[:-20], to_json(lease).replace(b'"ready"', b'"odd"')):
        with pytest.raises(MalformedLease, match="cannot be understood"):
            from_json(damaged)


# --- interleavings ---


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


@dataclass
class Actor:
    """A process with a view that may be old, and a belief about what it holds."""

    number: int
    views: dict[str, Kept] = field(default_factory=dict)
    believes: dict[str, tuple[Holder, float]] = field(default_factory=dict)
    observer: LeaseObserver = field(default_factory=LeaseObserver)

    @property
    def uid(self) -> str:
        return f"uid-{self.number}"


ACTORS = st.integers(0, 2)
SLICES = st.sampled_from(["s0", "s1"])
CHIPS = st.sets(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


class Interleavings(RuleBasedStateMachine):
    """Actors that act on old views, fall asleep, and drop who was silent."""

    def __init__(self) -> None:
        super().__init__()
        self.book = MemoryLeaseBook()
        self.actors = [Actor(number) for number in range(3)]
        self.now = 1000.0
        self.made: set[str] = set()
        self.deleted: set[str] = set()
        self.takes: dict[str, int] = {}

    def write(self, actor: Actor, name: str, change) -> Lease | None:
        """Change what the actor last saw; None if it was refused or somebody came first."""
        view = actor.views.get(name)
        if view is None:
            return None
        try:
            actor.views[name] = at_once(self.book.change(change(view.lease), view.generation))
        except (LeaseRefused, StaleGeneration):
            return None
        return actor.views[name].lease

    @rule(number=ACTORS, name=SLICES)
    def make(self, number: int, name: str) -> None:
        actor = self.actors[number]
        try:
            kept = at_once(self.book.create(intend(name, "p", V4, 4, actor.uid, self.now)))
        except LeaseExists:
            assert name in self.made
            return
        assert name not in self.made
        self.made.add(name)
        actor.views[name] = kept

    @rule(number=ACTORS, name=SLICES)
    def look(self, number: int, name: str) -> None:
        actor = self.actors[number]
        kept = at_once(self.book.read("p", name))
        if kept is not None:
            actor.views[name] = kept
            for silent in actor.observer.see(kept.lease, self.now):
                self.write(actor, name, lambda lease, s=silent: drop(lease, s, self.now))

    @rule(number=ACTORS, name=SLICES, chips=CHIPS, priority=st.integers(0, 2), fresh=st.booleans())
    def take(self, number: int, name: str, chips: tuple[int, ...], priority: int, fresh: bool) -> None:
        if fresh:
            self.look(number, name)
        actor = self.actors[number]
        wanted = Holder(f"r{number}", actor.uid, chips, priority)
        if (lease := self.write(actor, name, lambda lease: take(lease, wanted, self.now))) is not None:
            held = lease.holder(actor.uid)
            assert held is not None
            actor.believes[name] = (held, self.now)
            self.takes[name] = self.takes.get(name, 0) + 1

    @rule(number=ACTORS, name=SLICES)
    def beat(self, number: int, name: str) -> None:
        actor = self.actors[number]
        if name not in actor.believes:
            return
        held, _ = actor.believes[name]
        kept = at_once(self.book.read("p", name))
        assert kept is not None
        try:
            after = renew(kept.lease, actor.uid, held.term, self.now)
        except LeaseRefused:
            del actor.believes[name]
            return
        actor.views[name] = at_once(self.book.change(after, kept.generation))
        actor.believes[name] = (held, self.now)

    @rule(number=ACTORS, name=SLICES)
    def release(self, number: int, name: str) -> None:
        actor = self.actors[number]
        if self.write(actor, name, lambda lease: release(lease, actor.uid, self.now)) is not None:
            actor.believes.pop(name, None)

    @rule(number=ACTORS, name=SLICES, chips=CHIPS, priority=st.integers(0, 3), due=st.booleans())
    def claim(self, number: int, name: str, chips: tuple[int, ...], priority: int, due: bool) -> None:
        actor = self.actors[number]
        wanted = Claim(f"r{number}", actor.uid, priority, chips, due)
        self.write(actor, name, lambda lease: claim(lease, wanted, self.now))

    @rule(number=ACTORS, name=SLICES)
    def become_ready(self, number: int, name: str) -> None:
        self.write(self.actors[number], name, lambda lease: ready(lease, self.now))

    @rule(number=ACTORS, name=SLICES)
    def retire_and_delete(self, number: int, name: str) -> None:
        """The cloud deletes between the two changes, so the first one must be proof enough."""
        actor = self.actors[number]
        if self.write(actor, name, lambda lease: retire(lease, "idle", actor.uid)) is None:
            return
        self.deleted.add(name)
        for other in self.actors:
            if other is not actor and name in other.believes:
                held, beaten = other.believes[name]
                assert self.now - beaten >= LEASE_TTL_S, f"{held.run} holds what {actor.uid} deletes"
        kept = at_once(self.book.read("p", name))
        assert kept is not None
        actor.believes.pop(name, None)
        at_once(self.book.change(gone(kept.lease, "deleted", self.now, actor.uid), kept.generation))

    @precondition(lambda self: self.made)
    @rule(seconds=st.sampled_from([1.0, 14.0, 29.0, 45.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def no_chip_is_held_by_two_that_live(self) -> None:
        for name in self.made:
            alive = [
                held
                for actor in self.actors
                if name in actor.believes
                for held, beaten in [actor.believes[name]]
                if self.now - beaten < LEASE_TTL_S
            ]
            chips = [chip for held in alive for chip in held.chips]
            assert len(chips) == len(set(chips)), alive

    @invariant()
    def what_a_live_actor_believes_to_hold_is_written(self) -> None:
        for actor in self.actors:
            for name, (held, beaten) in actor.believes.items():
                if self.now - beaten < LEASE_TTL_S:
                    kept = at_once(self.book.read("p", name))
                    assert kept is not None
                    now_held = kept.lease.holder(actor.uid)
                    assert now_held is not None
                    assert (now_held.chips, now_held.term) == (held.chips, held.term)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        everything = {kept.lease.slice: kept.lease for kept in at_once(self.book.list("p", past=True))}
        living = {kept.lease.slice for kept in at_once(self.book.list("p"))}
        assert everything.keys() == self.made
        assert living == self.made - self.deleted
        for name, lease in everything.items():
            # Every take ended in a span, or is still there; of no chip do two uses overlap.
            used = [(s.chips, s.start, s.end) for s in lease.spans if s.run is not None]
            used += [(h.chips, h.since, float("inf")) for h in lease.holders]
            assert len(used) == self.takes.get(name, 0)
            for chip in range(4):
                times = sorted((start, end) for chips, start, end in used if chip in chips)
                assert all(end <= start for (_, end), (start, _) in pairwise(times))
            if lease.state is LeaseState.GONE:
                assert not lease.holders
                assert lease.claim is None
            assert from_json(to_json(lease)) == lease


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
