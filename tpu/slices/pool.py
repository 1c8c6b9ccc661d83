"""Who of those that wait gets which slice or chips: pure decisions over leases, each with a sentence that says why.

A run takes what is free and fits; else a slice is made, as long as the pool may grow; else runs of lower priority are
evicted, as whole gangs; else it waits, next in line for a slice.

One call costs about as much as looking at each lease and each waiting run once: whoever has thousands of either calls
it as often as something changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tpu.slices.candidate import Candidate
from tpu.slices.idle_room import IdleRoom
from tpu.slices.lease import Claim, Holder, Lease, LeaseState
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_shelves import (
    IN_ORDER,
    Kind,
    Shelf,
    Shelved,
    Target,
    block_of,
    blocks_of,
    kind_of,
    still_there,
    targets_of,
)
from tpu.topology import accelerator_type


@dataclass(frozen=True)
class Wanted:
    """What a run waits for: `slices` whole slices of one kind, or `chips` of one host.

    `candidates` are the ways to get them, in order; a slice of any of them fits if it has the same `flavour` (image,
    network and what else cannot be changed afterwards). `since` orders runs of the same priority. `can_create` are
    the candidates that may be asked for now; None is all of them.

    Raises:
        ValueError: no candidate, no slice, or chips of several slices.
    """

    run: str
    uid: str
    candidates: tuple[Candidate, ...]
    chips: int | None = None
    slices: int = 1
    priority: int = 0
    since: float = 0.0
    flavour: str = ""
    can_create: tuple[Candidate, ...] | None = None

    def __post_init__(self) -> None:
        if not self.candidates or self.slices < 1 or (self.chips is not None and self.slices > 1):
            raise ValueError(
                f"{self.run} wants {self.slices} slices, {self.chips} chips of {self.candidates}"
            )

    def __str__(self) -> str:
        what = f"{self.chips} chip(s) of" if self.chips is not None else f"{self.slices}"
        return f"{what} {' or '.join(map(str, self.candidates))}"


@dataclass(frozen=True)
class Part:
    """Chips of a slice that are free, once those that were silent for too long (`drop`) are dropped from it."""

    slice: str
    chips: tuple[int, ...]
    drop: tuple[Holder | Claim, ...] = ()


@dataclass(frozen=True)
class Take:
    """Take these now. If one of them is refused by its lease, give back the others and decide anew."""

    parts: tuple[Part, ...]
    reason: str


@dataclass(frozen=True)
class Create:
    """Make `count` slices, by these candidates in order; keep `reserve` by claims that are not due meanwhile."""

    count: int
    candidates: tuple[Candidate, ...]
    reason: str
    reserve: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Evict:
    """Claim these as due: their holders, the runs `victims`, leave. Then decide anew."""

    parts: tuple[Part, ...]
    victims: tuple[str, ...]
    reason: str
    reserve: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Wait:
    """Nothing can be done now. Claims are kept on `reserve` alone, none of them due."""

    reason: str
    reserve: tuple[Part, ...] = ()


Decision = Take | Create | Evict | Wait
Silent = Mapping[str, Collection[Holder | Claim]]


def assign(
    waiting: Sequence[Wanted],
    leases: Iterable[Lease],
    settings: PoolSettings,
    expired: Silent | None = None,
) -> dict[str, Decision]:
    """What each waiting run, by its uid, is to do now: by priority, then by who came first.

    `expired` are the holders and claims, by slice, that an observer has seen silent for too long. Decisions of one
    call fit together: no chip is given to two, and no more slices are made than the pool may have.
    """
    pool = _Pool(leases, settings, expired or {})
    order = sorted(waiting, key=lambda wanted: (-wanted.priority, wanted.since, wanted.uid))
    return {wanted.uid: pool.decide(wanted) for wanted in order}


def evictor(lease: Lease, uid: str) -> Claim | None:
    """The claim because of which a holder has to leave at its next commit; None if it may stay."""
    holder, claim = lease.holder(uid), lease.claim
    if holder is None or claim is None or not claim.due or claim.uid == uid:
        return None
    overlaps = set(claim.chips) & set(holder.chips)
    return claim if overlaps and holder.priority < claim.priority else None


# --- one call of `assign` ---


class _Pool:
    def __init__(self, leases: Iterable[Lease], settings: PoolSettings, expired: Silent) -> None:
        self._shelves: dict[Kind, Shelf] = defaultdict(Shelf)
        self._gang_chips: dict[str, int] = defaultdict(int)
        self._evicted: set[str] = set()
        self._settings = settings
        self._max = settings.max_slices
        living, shelved = 0, list[Shelved]()
        for lease in leases:
            if lease.state is LeaseState.GONE:
                continue
            living += 1  # one that is to be deleted still uses quota
            if not lease.open:
                continue
            silent = tuple(expired.get(lease.slice, ()))
            holders = tuple(holder for holder in lease.holders if holder not in silent)
            held = {chip for holder in holders for chip in holder.chips}
            claim = None if lease.claim in silent else lease.claim
            for holder in holders:
                self._gang_chips[holder.uid] += len(holder.chips)
            host_chips = _host_chips(lease.candidate.accelerator_type)
            one = Shelved(lease, host_chips, set(range(lease.chips)) - held, holders, claim, silent)
            self._shelves[kind_of(lease.candidate, lease.flavour)].put(one)
            shelved.append(one)
        self._idle = IdleRoom(shelved, settings)
        self._room = None if self._max is None else max(0, self._max - living)

    def decide(self, wanted: Wanted) -> Decision:
        shelves = [self._shelves[kind_of(c, wanted.flavour)] for c in wanted.candidates]
        if wanted.chips is not None:
            return self._decide_chips(wanted, wanted.chips, shelves)
        return self._decide_slices(wanted, shelves)

    # --- chips of a host ---

    def _decide_chips(self, wanted: Wanted, number: int, shelves: list[Shelf]) -> Decision:
        found = self._free_chips(wanted, number, shelves)
        if found is not None:
            shelf, one, chips = found
            shelf.use(one, Holder(wanted.run, wanted.uid, chips, wanted.priority))
            return Take((_part(one, chips),), _taken(one))
        if (going_on := self._evicting(wanted, shelves)) is not None:
            return going_on
        for shelf in shelves:
            if shelf.coming >= number:
                shelf.coming -= number
                return Wait(f"a slice with {number} free chip(s) is about to be made")
        if (created := self._create(wanted, 1)) is not None:
            kind = created.candidates[0]
            chips_made = accelerator_type(kind.accelerator_type).chips
            self._shelves[kind_of(kind, wanted.flavour)].coming += chips_made - number
            return created
        return self._evict(wanted, shelves, number, 1, ()) or self._wait(wanted, shelves)

    def _free_chips(
        self, wanted: Wanted, number: int, shelves: list[Shelf]
    ) -> tuple[Shelf, Shelved, tuple[int, ...]] | None:
        for state in IN_ORDER:
            for shelf in shelves:
                for one in shelf.claims_of(wanted.uid):
                    if one.lease.state is state and (chips := block_of(one, number)):
                        return shelf, one, chips
                # The fullest slices first, so that whole ones stay whole.
                for free in sorted(shelf.by_free[state]):
                    if free >= number and (found := self._fitting(wanted, shelf, state, free, number)):
                        return shelf, *found
        return None

    def _fitting(
        self, wanted: Wanted, shelf: Shelf, state: LeaseState, free: int, number: int
    ) -> tuple[Shelved, tuple[int, ...]] | None:
        found, closed = None, []
        for one in shelf.by_free[state][free].values():
            if one.closed_from(wanted.priority) and not one.is_claimed_by(wanted.uid):
                closed.append(one)  # to everybody who comes later in this call: looked at no more
            elif (chips := block_of(one, number)) and one.admits(wanted.uid, wanted.priority, chips):
                found = one, chips
                break
        for one in closed:
            shelf.by_free[state][free].pop(one.lease.slice)
        return found

    # --- whole slices ---

    def _decide_slices(self, wanted: Wanted, shelves: list[Shelf]) -> Decision:
        best: tuple[Shelf, list[Shelved]] | None = None
        for shelf in shelves:
            found = self._at_hand(wanted, shelf)
            if len(found) == wanted.slices and all(map(_to_be_taken, found)) and wanted.slices > 1:
                return self._take(wanted, shelf, found)
            if wanted.slices == 1 and found and found[0].whole:
                return self._take(wanted, shelf, found)
            if best is None or len(found) > len(best[1]):
                best = shelf, found
        assert best is not None  # there is a candidate
        shelf, found = best
        reserve = tuple(_part(one, one.lease.all_chips) for one in found)
        lacking = wanted.slices - len(found)
        decision = (
            self._evicting(wanted, [shelf], reserve)
            or (self._call_in(found, reserve, wanted) if not lacking else None)
            or self._create(wanted, lacking, reserve, self._kinds_beside(wanted, shelf, found))
            or self._evict(wanted, [shelf], None, lacking, reserve)
            or self._create_and_evict(wanted, shelf, found, reserve)
        )
        if decision is None:  # what cannot be completed keeps nothing: another one may need just that
            return self._wait(wanted, shelves if wanted.slices == 1 else [])
        for one in found:
            if one.claim is None:
                one.claim = Claim(wanted.run, wanted.uid, wanted.priority, one.lease.all_chips)
        return decision

    def _take(self, wanted: Wanted, shelf: Shelf, found: list[Shelved]) -> Take:
        for one in found:
            shelf.use(one, Holder(wanted.run, wanted.uid, one.lease.all_chips, wanted.priority))
        return Take(tuple(_part(one, one.lease.all_chips) for one in found), _taken(found[0]))

    def _at_hand(self, wanted: Wanted, shelf: Shelf) -> list[Shelved]:
        """Slices that it may have, no more than it wants: free ones, its own that are lent, those being made."""
        mine = shelf.claims_of(wanted.uid)
        found = [one for one in mine if _to_be_taken(one)]

        def add_free(state: LeaseState) -> None:
            for one in shelf.whole(state):
                if len(found) >= wanted.slices:
                    return
                if one.claim is None or (
                    wanted.slices == 1
                    and not one.is_claimed_by(wanted.uid)
                    and one.admits(wanted.uid, wanted.priority, one.lease.all_chips)
                ):
                    found.append(one)

        add_free(LeaseState.READY)
        if wanted.slices > 1:
            below = wanted.priority
            found += [one for one in mine if not one.whole and all(h.priority < below for h in one.holders)]
        found += [one for one in mine if one.whole and one.lease.state is LeaseState.INTENDED]
        add_free(LeaseState.INTENDED)
        return found[: wanted.slices]

    def _create_and_evict(
        self, wanted: Wanted, shelf: Shelf, found: list[Shelved], reserve: tuple[Part, ...]
    ) -> Create | None:
        """Make as many as the pool may have if the rest can be had by evicting, which comes once these are there."""
        room, lacking = self._room or 0, wanted.slices - len(found)
        if (
            not 0 < room < lacking
            or len(self._victims(wanted, [shelf], None, lacking - room)) < lacking - room
        ):
            return None
        return self._create(wanted, room, reserve, self._kinds_beside(wanted, shelf, found))

    def _call_in(self, found: list[Shelved], reserve: tuple[Part, ...], wanted: Wanted) -> Decision:
        """All slices of a gang are there or on their way: once all are ready, what was lent is asked back."""
        if not all(one.lease.state is LeaseState.READY for one in found):
            return Wait("slices of the gang are being made", reserve)
        lent = [one for one in found if not one.whole]
        victims = {h.run: None for one in lent for h in one.holders}
        for one in lent:
            one.claim = Claim(wanted.run, wanted.uid, wanted.priority, one.lease.all_chips, due=True)
        parts = tuple(_part(one, one.lease.all_chips) for one in lent)
        told = f"all slices of the gang are ready; {self._settings.leaves(tuple(victims))}"
        return Evict(parts, tuple(victims), told, reserve)

    def _kinds_beside(self, wanted: Wanted, shelf: Shelf, found: list[Shelved]) -> tuple[Candidate, ...]:
        """All slices of a gang are of one kind: what is to be made beside those that it has."""
        if not found:
            return wanted.candidates
        return tuple(c for c in wanted.candidates if self._shelves[kind_of(c, wanted.flavour)] is shelf)

    # --- for both ---

    def _create(
        self,
        wanted: Wanted,
        count: int,
        reserve: tuple[Part, ...] = (),
        kinds: tuple[Candidate, ...] | None = None,
    ) -> Create | None:
        allowed = wanted.candidates if wanted.can_create is None else wanted.can_create
        kinds = tuple(c for c in (kinds or wanted.candidates) if c in allowed)
        if not kinds or (self._room is not None and self._room < count):
            return None
        if self._room is not None:
            self._room -= count
        return Create(count, kinds, f"nothing that is free fits {wanted}", reserve)

    def _evicting(self, wanted: Wanted, shelves: list[Shelf], reserve: tuple[Part, ...] = ()) -> Evict | None:
        """What it has claimed as due already, and still waits for: nobody else is evicted beside."""
        due = [one for shelf in shelves for one in shelf.claims_of(wanted.uid) if _due(one)]
        parts, victims = [], {}
        for one in due:
            assert one.claim is not None
            chips = set(one.claim.chips)
            holders = [h for h in one.holders if chips & set(h.chips)]
            if any(h.priority >= wanted.priority for h in holders):
                continue
            victims |= {h.run: None for h in holders}
            parts.append(_part(one, one.claim.chips))
        if not parts:
            return None
        return Evict(tuple(parts), tuple(victims), self._leaving(victims), reserve)

    def _evict(
        self, wanted: Wanted, shelves: list[Shelf], number: int | None, count: int, reserve: tuple[Part, ...]
    ) -> Evict | None:
        """The targets that do the least harm, if `count` of them can be had from runs of lower priority."""
        chosen = self._victims(wanted, shelves, number, count)
        if len(chosen) < count:
            return None
        victims: dict[str, None] = {}
        for shelf, target in chosen:
            one = shelf.slices[target.slice]
            leaving = [h for h in one.holders if set(h.chips) & set(target.chips)]
            victims |= {holder.run: None for holder in leaving}
            self._evicted |= {holder.uid for holder in leaving}
            one.claim = Claim(wanted.run, wanted.uid, wanted.priority, target.chips, due=True)
        parts = tuple(_part(shelf.slices[target.slice], target.chips) for shelf, target in chosen)
        return Evict(parts, tuple(victims), self._leaving(victims), reserve)

    def _leaving(self, victims: Iterable[str]) -> str:
        return f"evicted for being of lower priority: {self._settings.leaves(tuple(victims))}"

    def _victims(
        self, wanted: Wanted, shelves: list[Shelf], number: int | None, count: int
    ) -> list[tuple[Shelf, Target]]:
        """At most `count` targets of lower priority. Those that nobody after it can have either are thrown away."""
        chosen: list[tuple[Shelf, Target]] = []
        slices: set[str] = set()
        for shelf in shelves:
            if number not in shelf.targets:
                shelf.targets[number] = targets_of(shelf.slices.values(), number, self._gang_chips)
            targets, passed = shelf.targets[number], []
            while targets and len(chosen) < count and targets[-1].priority < wanted.priority:
                target = targets.pop()
                one = shelf.slices[target.slice]
                taken = one.claim is not None and not one.is_claimed_by(wanted.uid)
                if (taken and one.claim is not None and one.claim.priority >= wanted.priority) or not (
                    still_there(one, target, self._evicted)
                ):
                    continue
                passed.append(target)
                if target.slice not in slices:
                    slices.add(target.slice)
                    chosen.append((shelf, target))
            targets += reversed(passed)
        return chosen

    def _wait(self, wanted: Wanted, shelves: Iterable[Shelf]) -> Wait:
        """Wait, if possible next in line for a slice: who leaves it then gives it back, and does not delete it."""
        reserve: tuple[Part, ...] = ()
        for shelf in shelves:
            if (one := shelf.next_in_line(wanted.uid)) is not None:
                blocks = [one.lease.all_chips] if wanted.chips is None else blocks_of(one, wanted.chips)
                if blocks:
                    one.claim = one.claim or Claim(wanted.run, wanted.uid, wanted.priority, tuple(blocks[0]))
                    reserve = (_part(one, one.claim.chips),)
                    break
        if self._room == 0:
            told = f"the pool has its {self._max} slices (max_slices), and none is free for {wanted}"
        else:
            told = f"no slice is free for {wanted}, and none can be made now"
        if self._room is not None and self._room < wanted.slices:
            kinds = {kind_of(candidate, wanted.flavour) for candidate in wanted.candidates}
            if (idle := self._idle.sentence(kinds)) is not None:
                told += f". {idle}"
        return Wait(told, reserve)


def _part(one: Shelved, chips: Iterable[int]) -> Part:
    return Part(one.lease.slice, tuple(sorted(chips)), one.drop)


def _to_be_taken(one: Shelved) -> bool:
    return one.whole and one.lease.state is LeaseState.READY


def _due(one: Shelved) -> bool:
    return one.claim is not None and one.claim.due and not one.whole


def _taken(one: Shelved) -> str:
    told = "is free" if one.lease.state is LeaseState.READY else "is being made"
    silent = [party.run for party in one.drop if isinstance(party, Holder)]
    return f"{one.lease.slice} {told}" + (f" ({', '.join(silent)} was silent for too long)" if silent else "")


@cache
def _host_chips(name: str) -> int:
    return accelerator_type(name).chips_per_host
