"""Leases laid out for decisions: by kind and by how much of them is free, so that what fits is found at once. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tpu.slices.candidate import Candidate
from tpu.slices.lease import Claim, Holder, Lease, LeaseState, ends_with, may_borrow

# What is ready is taken before what is still being made.
IN_ORDER = (LeaseState.READY, LeaseState.INTENDED)

Kind = tuple[str, str, str, str]


def kind_of(candidate: Candidate, flavour: str) -> Kind:
    return candidate.zone, candidate.accelerator_type, candidate.provisioning, flavour


@dataclass(frozen=True, order=True)
class Target:
    """Chips that could be had by evicting: ordered by the harm that this does."""

    priority: int  # of the most important victim
    chips_lost: int  # over all slices of the victims' gangs
    newest: float  # minus the start of the victim that has been there for longest
    slice: str
    chips: tuple[int, ...]


@dataclass(eq=False)
class Shelved:
    """A lease as it is while decisions are made: those of this call are taken into account."""

    lease: Lease
    host_chips: int
    free: set[int]
    holders: tuple[Holder, ...]
    claim: Claim | None
    drop: tuple[Holder | Claim, ...]

    @property
    def whole(self) -> bool:
        return len(self.free) == self.lease.chips

    def is_claimed_by(self, uid: str) -> bool:
        return self.claim is not None and self.claim.uid == uid

    def closed_from(self, priority: int) -> bool:
        """Whether a claim keeps all of it from runs of this priority and below."""
        claim = self.claim
        return (
            claim is not None
            and claim.due
            and claim.priority >= priority
            and len(claim.chips) == self.lease.chips
        )

    def admits(self, uid: str, priority: int, chips: Collection[int]) -> bool:
        """Whether no claim keeps these chips for somebody else."""
        claim = self.claim
        if claim is None or claim.uid == uid or claim.priority < priority:
            return True
        return may_borrow(claim, priority, chips)


@dataclass
class Shelf:
    """The open slices of one kind, by state and the number of their free chips: a fitting one is found at once."""

    slices: dict[str, Shelved] = field(default_factory=dict)
    by_free: dict[LeaseState, dict[int, dict[str, Shelved]]] = field(
        default_factory=lambda: {state: defaultdict(dict) for state in IN_ORDER}
    )
    claimed_by: dict[str, list[Shelved]] = field(default_factory=lambda: defaultdict(list))
    # Of a whole slice (None) or so many chips: what could be had by evicting, the least harm first.
    targets: dict[int | None, list[Target]] = field(default_factory=dict)
    # Slices that nobody has claimed yet, for those who have to wait; looked for when the first one has to.
    unclaimed: list[Shelved] | None = None
    # Chips of slices that others are told to make in this call.
    coming: int = 0
    chips: int = 0

    def put(self, one: Shelved) -> None:
        self.chips = one.lease.chips
        self.slices[one.lease.slice] = one
        self.by_free[one.lease.state][len(one.free)][one.lease.slice] = one
        if one.claim is not None:
            self.claimed_by[one.claim.uid].append(one)

    def claims_of(self, uid: str) -> list[Shelved]:
        return [one for one in self.claimed_by.get(uid, ()) if one.is_claimed_by(uid)]

    def use(self, one: Shelved, taker: Holder) -> None:
        """Give chips to somebody who is told to take them; a claim is fulfilled by it, or gives way."""
        if one.claim is not None and ends_with(one.claim, taker):
            one.claim = None
        one.holders = (*one.holders, taker)
        by_free = self.by_free[one.lease.state]
        by_free[len(one.free)].pop(one.lease.slice, None)
        one.free -= set(taker.chips)
        by_free[len(one.free)][one.lease.slice] = one

    def next_in_line(self, uid: str) -> Shelved | None:
        """A slice to claim for when it is left: the one that is claimed already, or one that nobody else has."""
        if mine := self.claims_of(uid):
            return mine[0]
        if self.unclaimed is None:
            self.unclaimed = [one for one in self.slices.values() if one.claim is None]
        while self.unclaimed:
            if (one := self.unclaimed.pop()).claim is None:
                return one
        return None

    def whole(self, state: LeaseState) -> Iterable[Shelved]:
        """Slices of which nobody holds a chip."""
        return self.by_free[state].get(self.chips, {}).values()


def still_there(one: Shelved, target: Target, evicted: Collection[str]) -> bool:
    """Whether nobody of this call has taken chips of it or evicts the same runs."""
    victims = [h for h in one.holders if set(h.chips) & set(target.chips)]
    free = set(target.chips) - {chip for holder in victims for chip in holder.chips}
    return free <= one.free and not any(holder.uid in evicted for holder in victims)


def block_of(one: Shelved, number: int) -> tuple[int, ...] | None:
    """Free chips of one host that lie together; out of the smallest free piece, so that larger ones stay whole."""
    if number > one.host_chips:
        return None
    best: tuple[int, tuple[int, ...]] | None = None
    for block in blocks_of(one, number):
        if one.free.issuperset(block):
            size = number
            while size < one.host_chips and one.free.issuperset(_around(block[0], size * 2)):
                size *= 2
            if best is None or size < best[0]:
                best = (size, tuple(block))
    return best[1] if best else None


def blocks_of(one: Shelved, number: int) -> list[range]:
    return [
        range(first, first + number)
        for host in range(0, one.lease.chips, one.host_chips)
        for first in range(host, host + one.host_chips - number + 1, number)
    ]


def _around(chip: int, size: int) -> range:
    first = chip // size * size
    return range(first, first + size)


def targets_of(slices: Iterable[Shelved], number: int | None, gang_chips: Mapping[str, int]) -> list[Target]:
    """All that could be had by evicting, the least harm last; whole slices, or so many chips of a host."""
    found = []
    for one in slices:
        if one.lease.state is not LeaseState.READY:
            continue
        blocks = [one.lease.all_chips] if number is None else blocks_of(one, number)
        for block in blocks:
            wanted = set(block)
            victims = [h for h in one.holders if wanted & set(h.chips)]
            if victims:
                found.append(
                    Target(
                        max(h.priority for h in victims),
                        sum(gang_chips[h.uid] for h in victims),
                        -min(h.since for h in victims),
                        one.lease.slice,
                        tuple(block),
                    )
                )
    return sorted(found, reverse=True)
