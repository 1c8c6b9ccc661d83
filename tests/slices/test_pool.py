"""Who gets which slice: tables for each rule, and pools of many runs that are served to the last one."""

from __future__ import annotations

import datetime
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu.slices.candidate import Candidate
from tpu.slices.lease import (
    Claim,
    Holder,
    Lease,
    LeaseState,
    claim,
    drop,
    intend,
    quarantine,
    ready,
    release,
    take,
    unclaim,
)
from tpu.slices.pool import (
    Create,
    Evict,
    Part,
    Take,
    Wait,
    Wanted,
    assign,
    evictor,
)
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_size import idle_too_long, keeps, missing, too_many

V4 = Candidate("us-central2-b", "v4-8", "spot")
OTHER = Candidate("us-east5-b", "v6e-8", "spot")
ALL = (0, 1, 2, 3)


def slice_of(name: str, *holders: Holder, candidate: Candidate = V4, is_ready: bool = True) -> Lease:
    chips = 8 if candidate is OTHER else 4
    lease = intend(name, "p", candidate, chips, "maker", 0.0)
    if is_ready:
        lease = ready(lease, 1.0)
    for holder in holders:
        lease = take(lease, holder, 2.0)
    return lease


def run(name: str, *chips: int, priority: int = 0) -> Holder:
    return Holder(name, f"uid-{name}", chips, priority)


def wants(name: str, chips: int | None = None, **values) -> Wanted:
    return Wanted(**{"run": name, "uid": f"uid-{name}", "candidates": (V4,), "chips": chips} | values)


def decision(wanted: Wanted, *leases: Lease, expired=None, **values):
    return assign([wanted], leases, PoolSettings(**values), expired)[wanted.uid]


def parts(*names: str, chips: tuple[int, ...] = ALL) -> tuple[Part, ...]:
    return tuple(Part(name, chips) for name in names)


# --- taking ---


def test_a_free_slice_that_fits_is_taken_and_no_other():
    leases = [
        slice_of("busy", run("a", 0)),
        slice_of("other-kind", candidate=OTHER),
        replace(slice_of("other-image"), flavour="image"),
        quarantine(slice_of("ill"), "chips busy"),
        slice_of("free"),
    ]
    found = decision(wants("r"), *leases)
    assert isinstance(found, Take)
    assert found.parts == parts("free")
    assert decision(wants("r", flavour="image"), *leases).parts == parts("other-image")


def test_candidates_are_tried_in_their_order_and_what_is_ready_comes_first():
    both = wants("r", candidates=(OTHER, V4))
    assert decision(both, slice_of("v4"), slice_of("v6e", candidate=OTHER)).parts[0].slice == "v6e"
    coming = slice_of("v6e", candidate=OTHER, is_ready=False)
    assert decision(replace(both, chips=1), slice_of("v4"), coming).parts[0].slice == "v4"


def test_chips_are_taken_from_the_fullest_slice_and_lie_together():
    leases = [slice_of("whole"), slice_of("one-held", run("a", 1)), slice_of("three-held", run("b", 0, 2, 3))]
    assert decision(wants("r", 1), *leases).parts == parts("three-held", chips=(1,))
    assert decision(wants("r", 2), *leases).parts == parts("one-held", chips=(2, 3))
    assert decision(wants("r", 4), *leases).parts == parts("whole")
    # 0 and 3 are free, and no pair of neighbours.
    scattered = slice_of("scattered", run("a", 1, 2))
    assert isinstance(decision(wants("r", 2), scattered), Create)
    # The piece that is broken already is used up before another one is broken.
    assert decision(wants("r", 1), slice_of("s", run("a", 2))).parts[0].chips == (3,)


def test_a_slice_in_creation_is_shared_by_those_that_want_a_part():
    coming = slice_of("coming", run("maker", 0), is_ready=False)
    assert decision(wants("r", 1), coming).parts == parts("coming", chips=(1,))


def test_who_was_silent_is_dropped_first_and_that_is_said():
    lease = slice_of("s", run("dead", *ALL))
    found = decision(wants("r"), lease, expired={"s": lease.holders})
    assert isinstance(found, Take)
    assert found.parts == (Part("s", ALL, lease.holders),)
    assert "dead was silent" in found.reason


def test_no_chip_is_given_to_two_in_one_call():
    waiting = [wants(f"r{n}", 1, since=n) for n in range(6)]
    found = assign(waiting, [slice_of("s")], PoolSettings(max_slices=1))
    taken = [d.parts[0].chips for d in found.values() if isinstance(d, Take)]
    assert sorted(taken) == [(0,), (1,), (2,), (3,)]
    assert [type(found[f"uid-r{n}"]) for n in range(6)] == [Take] * 4 + [Wait] * 2


def test_priority_comes_before_arrival():
    waiting = [wants("early", since=1.0), wants("late", since=2.0), wants("urgent", priority=1, since=3.0)]
    found = assign(waiting, [slice_of("s1"), slice_of("s2")], PoolSettings(max_slices=2))
    assert [uid for uid, d in found.items() if isinstance(d, Take)] == ["uid-urgent", "uid-early"]


# --- making ---


def test_a_slice_is_made_when_none_fits_as_long_as_the_pool_may_grow():
    found = decision(wants("r", candidates=(OTHER, V4)), slice_of("busy", run("a", 0)), max_slices=2)
    assert isinstance(found, Create)
    assert (found.count, found.candidates) == (1, (OTHER, V4))
    full = decision(wants("r"), slice_of("busy", run("a", 0)), max_slices=1)
    assert isinstance(full, Wait)
    assert "max_slices" in full.reason


def test_a_full_pool_names_the_idle_slice_that_fits_nobody_and_how_to_free_its_place():
    idle = replace(slice_of("idle", candidate=OTHER), free_since=1e9)
    older = replace(idle, slice="older", free_since=1e9 - 600)
    claimed = claim(
        replace(older, slice="kept", free_since=1.0), Claim("g", "uid-g", 0, tuple(range(8))), 2.0
    )
    full = (idle, claimed, older, slice_of("busy", run("a", *ALL)))
    until = datetime.datetime.fromtimestamp(1e9).strftime("%m-%d %H:%M")
    told = decision(wants("r"), *full, max_slices=4, idle_minutes=10).reason
    assert "(max_slices), and none is free for 1 spot v4-8" in told
    assert told.endswith(
        f". older (spot v6e-8 in us-east5-b) has a place, is idle and does not fit; it is kept until {until} "
        "(idle_minutes); to free its place now: relay pool set p --idle-minutes 0, then relay reap --pool p"
    )
    # Who comes earlier takes it; then the next one is in the way.
    both = [wants("first", candidates=(OTHER,), chips=8), wants("r", since=1.0)]
    found = assign(both, full, PoolSettings(max_slices=4, idle_minutes=10))
    taken = found["uid-first"]
    assert isinstance(taken, Take)
    left = ({"idle", "older"} - {taken.parts[0].slice}).pop()
    assert f". {left} (spot v6e-8" in found["uid-r"].reason
    told = decision(wants("r"), *full, max_slices=4).reason
    assert told.endswith("it is kept until the next `relay reap --pool p`")
    told = decision(wants("r"), *full, max_slices=4, min_slices=4, candidates=(V4,), idle_minutes=10).reason
    assert told.endswith("relay pool set p --min-slices 3 --idle-minutes 0, then relay reap --pool p")
    for silent in (
        decision(wants("r"), *full, max_slices=9),  # it may be made
        decision(wants("r", slices=3, candidates=(OTHER,)), *full, max_slices=4),  # it would be of use
        decision(wants("r"), claimed, max_slices=1),  # somebody waits for it
    ):
        assert "is idle" not in silent.reason


def test_a_quarantined_slice_still_counts_and_a_candidate_that_may_not_be_asked_for_is_left_out():
    assert isinstance(decision(wants("r"), quarantine(slice_of("s"), "ill"), max_slices=1), Wait)
    assert decision(wants("r", candidates=(OTHER, V4), can_create=(V4,))).candidates == (V4,)
    assert isinstance(decision(wants("r", can_create=())), Wait)


def test_of_many_one_chip_runs_one_makes_the_slice_for_four():
    found = assign([wants(f"r{n}", 1, since=n) for n in range(9)], [], PoolSettings())
    assert Counter(type(d) for d in found.values()) == {Create: 3, Wait: 6}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_that_fill_the_pool_at_once_the_later_intent_withdraws(order):
    settings = PoolSettings(max_slices=1)
    both = [slice_of("a", is_ready=False), slice_of("b", is_ready=False)]
    kept = [(both[place], 10 + place) for place in order]
    assert too_many(kept, both[0], settings) is None
    assert "max_slices" in (too_many(kept, both[1], settings) or "")
    # The first one changes its lease, which gives it a later generation: its place is written down.
    changed = [(replace(both[0], order=10), 99), (both[1], 11)]
    assert too_many(changed, both[0], settings) is None
    assert too_many(changed, both[1], settings)
    assert too_many(kept, both[1], PoolSettings()) is None


# --- evicting ---


def test_lower_priorities_are_evicted_where_it_does_the_least_harm():
    leases = [
        slice_of("equal", run("a", 0, priority=5)),
        slice_of("higher-victim", run("b", 0, priority=3)),
        slice_of("two", run("c", 0), run("d", 1)),
        slice_of("one", run("e", 0)),
    ]
    found = decision(wants("r", priority=5), *leases, max_slices=4)
    assert isinstance(found, Evict)
    assert (found.parts, found.victims) == (parts("one"), ("e",))
    assert isinstance(decision(wants("r", priority=0), *leases, max_slices=4), Wait)
    assert isinstance(decision(wants("r", priority=5), *leases, max_slices=5), Create)


def test_who_wants_a_chip_evicts_no_more_than_that_chip_needs():
    lease = slice_of("s", run("a", 0, 1), run("b", 2), run("c", 3, priority=9))
    assert decision(wants("r", 1, priority=5), lease, max_slices=1).victims == ("b",)
    assert decision(wants("r", 2, priority=5), lease, max_slices=1).victims == ("a",)


def test_an_eviction_that_goes_on_is_not_followed_by_another_one():
    busy = claim(slice_of("s", run("a", *ALL)), Claim("r", "uid-r", 5, ALL, due=True), 3.0)
    cheaper = slice_of("cheaper", run("b", 0))
    found = decision(wants("r", priority=5), busy, cheaper, max_slices=2)
    assert (found.parts, found.victims) == (parts("s"), ("a",))
    # Once they have left, the claim is its own.
    left = release(busy, "uid-a", 9.0)
    assert decision(wants("r", priority=5), left, cheaper, max_slices=2).parts == parts("s")
    assert isinstance(decision(wants("other", priority=5), left, max_slices=1), Wait)


def test_two_do_not_evict_the_same_run():
    leases = [slice_of("s1", run("a", *ALL)), slice_of("s2", run("b", *ALL, priority=1))]
    waiting = [wants(f"r{n}", priority=5, since=n) for n in range(3)]
    found = assign(waiting, leases, PoolSettings(max_slices=2))
    assert [getattr(d, "victims", None) for d in found.values()] == [("a",), ("b",), None]


def test_a_holder_hears_of_a_due_claim_on_its_chips_only():
    lease = slice_of("s", run("a", 0), run("b", 1), run("c", 2, priority=9))
    due = Claim("r", "uid-r", 5, (0, 1), due=True)
    lease = claim(lease, due, 3.0)
    assert evictor(lease, "uid-a") == replace(due, since=3.0)
    assert evictor(lease, "uid-c") is None
    assert evictor(lease, "uid-nobody") is None
    assert evictor(claim(lease, replace(due, due=False), 4.0), "uid-a") is None


# --- gangs of several slices ---


def gang(number: int, **values) -> Wanted:
    return wants("gang", slices=number, **values)


def test_a_gang_takes_all_of_its_slices_or_none():
    three = [slice_of(f"s{n}") for n in range(3)]
    assert decision(gang(3), *three).parts == parts("s0", "s1", "s2")
    found = decision(gang(3), *three[:2])
    assert isinstance(found, Create)
    assert (found.count, found.reserve) == (1, parts("s0", "s1"))
    assert isinstance(decision(gang(3), *three[:2], max_slices=2), Wait)
    assert decision(gang(3), *three[:2], max_slices=2).reserve == ()


def test_a_gangs_slices_are_of_one_kind():
    mixed = [slice_of("a"), slice_of("b", candidate=OTHER), slice_of("c", candidate=OTHER)]
    found = decision(gang(3, candidates=(V4, OTHER)), *mixed)
    assert isinstance(found, Create)
    assert (found.candidates, found.reserve) == ((OTHER,), parts("b", "c", chips=tuple(range(8))))


def test_reserved_slices_are_lent_to_small_runs_and_asked_back_when_all_are_ready():
    mine = Claim("gang", "uid-gang", 5, ALL)
    reserved = claim(slice_of("reserved"), mine, 3.0)
    coming = claim(slice_of("coming", is_ready=False), mine, 3.0)
    assert (
        decision(wants("small", 1, priority=4), reserved, coming, max_slices=2).parts[0].slice == "reserved"
    )
    assert isinstance(decision(wants("equal", 1, priority=5), reserved, coming, max_slices=2), Wait)

    lent = take(reserved, run("small", 0, priority=4), 4.0)
    assert isinstance(decision(gang(2, priority=5), lent, coming, max_slices=2), Wait)
    assert len(decision(gang(2, priority=5), lent, coming, max_slices=2).reserve) == 2
    found = decision(gang(2, priority=5), lent, ready(coming, 5.0), max_slices=2)
    assert isinstance(found, Evict)
    assert (found.parts, found.victims) == (parts("reserved"), ("small",))
    back = release(lent, "uid-small", 6.0)
    assert len(decision(gang(2, priority=5), back, ready(coming, 5.0), max_slices=2).parts) == 2


def test_a_gang_that_cannot_grow_the_pool_makes_what_it_may_and_evicts_the_rest():
    leases = [slice_of("free"), slice_of("low", run("a", 0))]
    found = decision(gang(3, priority=5), *leases, max_slices=3)
    assert isinstance(found, Create)
    assert (found.count, found.reserve) == (1, parts("free"))
    mine = Claim("gang", "uid-gang", 5, ALL)
    now = [claim(leases[0], mine, 3.0), leases[1], claim(slice_of("made"), mine, 3.0)]
    found = decision(gang(3, priority=5), *now, max_slices=3)
    assert isinstance(found, Evict)
    assert (found.parts, found.victims) == (parts("low"), ("a",))


# --- size ---


def test_idle_slices_go_after_idle_minutes_the_longest_idle_first_and_never_below_the_least():
    names = ["old", "older", "used", "claimed"]
    leases = [slice_of(name) for name in names]
    leases[1] = replace(leases[1], free_since=0.0)
    leases[2] = take(leases[2], run("a", 0), 2.0)
    leases[3] = claim(leases[3], Claim("g", "uid-g", 1, ALL), 2.0)
    minutes = PoolSettings(idle_minutes=10)
    assert idle_too_long(leases, minutes, 599.0) == []
    assert idle_too_long(leases, minutes, 602.0) == ["older", "old"]
    least = PoolSettings(idle_minutes=10, min_slices=3, candidates=(V4,))
    assert idle_too_long(leases, least, 602.0) == ["older"]
    assert missing([*leases, quarantine(slice_of("ill"), "ill")], replace(least, min_slices=5)) == 1


def test_a_slice_is_given_back_if_the_pool_keeps_idle_ones_or_has_too_few():
    lease = slice_of("s", run("a", *ALL))
    assert not keeps([lease], PoolSettings())
    assert keeps([lease], PoolSettings(idle_minutes=1))
    assert keeps([lease], PoolSettings(min_slices=1, candidates=(V4,)))
    assert not keeps([lease, slice_of("t")], PoolSettings(min_slices=1, candidates=(V4,)))


# --- pools that run ---


@dataclass
class Life:
    """Runs on a pool, moved on by decisions alone: a run that holds what it wants ends after some rounds."""

    settings: PoolSettings
    leases: dict[str, Lease] = field(default_factory=dict)
    holding: dict[str, tuple[Wanted, int]] = field(default_factory=dict)
    made: int = 0
    round: int = 0
    evictions: int = 0

    def step(self, waiting: list[Wanted], rng: random.Random) -> list[Wanted]:
        self.round += 1
        now = float(self.round)
        for name, lease in self.leases.items():
            if lease.state is LeaseState.INTENDED and rng.random() < 0.5:
                self.leases[name] = ready(lease, now)
        for uid, (wanted, left) in list(self.holding.items()):
            told = [lease for lease in self.leases.values() if evictor(lease, uid)]
            if left == 0 or told:
                del self.holding[uid]
                self.leases = {name: release(lease, uid, now) for name, lease in self.leases.items()}
                if left:
                    self.evictions += 1
                    assert all(
                        c is not None and c.priority > wanted.priority for c in (x.claim for x in told)
                    )
                    waiting = [*waiting, wanted]
            else:
                self.holding[uid] = (wanted, left - 1)
        found = assign(waiting, self.leases.values(), self.settings)
        for wanted in sorted(waiting, key=lambda w: (-w.priority, w.since)):
            self.apply(wanted, found[wanted.uid], now, rng)
        assert self.settings.max_slices is None or len(self.leases) <= self.settings.max_slices
        return [wanted for wanted in waiting if wanted.uid not in self.holding]

    def apply(self, wanted: Wanted, chosen, now: float, rng: random.Random) -> None:
        kept = [*getattr(chosen, "reserve", ()), *(chosen.parts if isinstance(chosen, Evict | Take) else ())]
        names = {part.slice for part in kept}
        self.leases = {n: x if n in names else unclaim(x, wanted.uid) for n, x in self.leases.items()}
        holder = Holder(wanted.run, wanted.uid, (), wanted.priority)
        mine = Claim(wanted.run, wanted.uid, wanted.priority, ())
        for part in getattr(chosen, "reserve", ()):
            self.leases[part.slice] = claim(self.leases[part.slice], replace(mine, chips=part.chips), now)
        match chosen:
            case Take():
                for part in chosen.parts:
                    self.leases[part.slice] = take(
                        self.leases[part.slice], replace(holder, chips=part.chips), now
                    )
                self.holding[wanted.uid] = (wanted, rng.randint(0, 4))
            case Evict():
                for part in chosen.parts:
                    due = replace(mine, chips=part.chips, due=True)
                    self.leases[part.slice] = claim(self.leases[part.slice], due, now)
            case Create():
                for _ in range(chosen.count):
                    self.made += 1
                    lease = intend(f"made-{self.made}", "p", chosen.candidates[0], 4, wanted.uid, now)
                    self.leases[lease.slice] = (
                        claim(lease, replace(mine, chips=ALL), now)
                        if wanted.slices > 1 or wanted.chips is None
                        else lease
                    )


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([None, 1, 1, 2, 4]), st.integers(1, 3), st.integers(0, 2)), max_size=14
    ),
    most=st.integers(3, 6),
    seed=st.integers(0, 1000),
)
def test_every_run_of_a_small_pool_is_served_and_no_chip_twice(kinds, most, seed):
    """Leases refuse what decisions got wrong, so a chip given twice would raise here."""
    waiting = [
        wants(f"r{n}", chips, slices=slices if chips is None else 1, priority=priority, since=float(n))
        for n, (chips, slices, priority) in enumerate(kinds)
    ]
    life, rng, rounds = Life(PoolSettings(max_slices=most)), random.Random(seed), 0
    while waiting or life.holding:
        waiting = life.step(waiting, rng)
        rounds += 1
        assert rounds < 40 * (len(kinds) + 1), "somebody waits for ever"
    assert not any(lease.claim for lease in life.leases.values())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_of_the_same_wish_nobody_less_important_is_served_first(data):
    held = data.draw(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=5))
    leases = [
        slice_of(f"s{n}", *([run(f"h{n}", *chips, priority=9)] if chips else []))
        for n, chips in enumerate(held)
    ]
    number = data.draw(st.sampled_from([None, 1, 2]))
    ranks = data.draw(st.lists(st.integers(0, 3), max_size=8))
    waiting = [wants(f"r{n}", number, priority=rank, since=float(n)) for n, rank in enumerate(ranks)]
    found = assign(waiting, leases, PoolSettings(max_slices=len(leases)))
    served = [w for w in waiting if isinstance(found[w.uid], Take)]
    left = [w for w in waiting if not isinstance(found[w.uid], Take)]
    order = [(-w.priority, w.since) for w in served], [(-w.priority, w.since) for w in left]
    assert not served or not left or max(order[0]) < min(order[1])


def test_dropping_who_was_silent_makes_the_take_possible():
    lease = claim(slice_of("s", run("dead", 0, 1)), Claim("gone", "uid-gone", 7, ALL), 3.0)
    assert lease.claim is not None
    silent = (*lease.holders, lease.claim)
    (part,) = decision(wants("r"), lease, expired={"s": silent}).parts
    for party in part.drop:
        lease = drop(lease, party, 9.0)
    assert take(lease, run("r", *part.chips), 9.0).free_chips == ()


def cpu_seconds(count: int) -> float:
    """For as many slices, most of them partly held, and as many waiting runs of every kind."""
    rng = random.Random(count)
    leases = [
        slice_of(f"s{n}", *(run(f"h{n}-{chip}", chip, priority=rng.randint(0, 3)) for chip in range(n % 5)))
        for n in range(count)
    ]
    waiting = [
        wants(f"r{n}", rng.choice([None, 1, 2, 4]), slices=1, priority=rng.randint(0, 4), since=float(n))
        for n in range(count)
    ]
    began = time.process_time()
    assign(waiting, leases, PoolSettings(max_slices=count))
    # None of these may have one of the idle ones of another kind, which stand in everybody's way.
    idle = [replace(slice_of(f"i{n}", candidate=OTHER), free_since=float(n)) for n in range(count)]
    assign(waiting, [*leases, *idle], PoolSettings(max_slices=count))
    return time.process_time() - began


def test_ten_times_the_slices_and_runs_cost_about_ten_times_the_time():
    cpu_seconds(300)
    small = min(cpu_seconds(500) for _ in range(3))
    assert cpu_seconds(5000) < 30 * small
