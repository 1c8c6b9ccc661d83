"""The right to use a slice, or some of its chips. Pure: each change is a function from lease to lease.

One lease a slice, one object in the bucket, changed by compare-and-set alone: so of two who take the same chip one
is refused, and what is being deleted cannot be taken. A lease is never deleted. `tpu.slices.lease_book` reads and
writes them.

A holder shows that it lives by its `beat`. Whether it has died only an observer can say, by its own clock
(`LeaseObserver`): clocks of different machines are never compared. Its `term` tells this holder of chips from all that
held them before and after: hosts refuse what comes with a lower one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from tpu.slices.candidate import Candidate

# A holder beats this often, and is taken for dead by who has seen the same beat for so long.
LEASE_BEAT_S = 15.0
LEASE_TTL_S = 60.0
# An observer that has looked away for so long has not watched the holder be silent: it begins anew.
LONGEST_GAP_S = 30.0
# Past uses that are kept one by one; older ones are kept as two sums.
MOST_SPANS = 400
OLDER = "older uses"


class LeaseRefused(Exception):
    """A change that the lease does not allow; the message says why. Read it again and decide anew."""


class MalformedLease(ValueError):
    """A lease cannot be read; the message shows what it holds."""


class LeaseState(Enum):
    """What a lease says of its slice; what the cloud says is asked for again before it is used."""

    INTENDED = "intended"  # about to be asked for, or asked for
    READY = "ready"
    QUARANTINED = "quarantined"  # nobody may take it any more; deleted once nobody holds it
    GONE = "gone"  # the cloud has confirmed that it is no more


@dataclass(frozen=True)
class Holder:
    """Who uses chips of a slice. `uid` is the run's own, also when another process drives it later.

    A holder of no chips keeps a slice from being taken for forgotten, for instance while it is being made.
    """

    run: str
    uid: str
    chips: tuple[int, ...]
    priority: int = 0
    since: float = 0.0
    term: int = 0
    beat: int = 0


@dataclass(frozen=True)
class Claim:
    """Who is to have chips next.

    Not `due`: the claimer waits for something else, such as its other slices, and the chips may be lent to runs of
    lower priority meanwhile. `due`: whoever holds them leaves at its next commit, or evict_minutes later; `since` is
    then since when it is due.
    """

    run: str
    uid: str
    priority: int
    chips: tuple[int, ...]
    due: bool = False
    since: float = 0.0
    beat: int = 0


@dataclass(frozen=True)
class Span:
    """A past use of chips; `run` is None while the whole slice was free. Times are seconds since 1970."""

    run: str | None
    chips: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Lease:
    """A slice of a pool: what it is, who has its chips (numbered through all hosts) and who had them.

    `creator` is the uid of who made it. `flavour` stands for what else of it cannot be changed (image, network and the
    like): who takes it must want the same. `term` counts the takes. `order` is the place of its creation among all of
    the pool's, None until its creator has written it down. Times are seconds since 1970 by the clock of who wrote
    them: for people and money, never for decisions between machines. `older_used_s` and `older_idle_s` are
    chip-seconds of spans that are no longer kept one by one.
    """

    slice: str
    pool: str
    candidate: Candidate
    chips: int
    state: LeaseState
    creator: str
    created: float
    flavour: str = ""
    holders: tuple[Holder, ...] = ()
    claim: Claim | None = None
    term: int = 0
    order: int | None = None
    ready: float | None = None
    free_since: float | None = None
    gone: float | None = None
    why: str = ""
    spans: tuple[Span, ...] = ()
    older_used_s: float = 0.0
    older_idle_s: float = 0.0

    @property
    def all_chips(self) -> tuple[int, ...]:
        return tuple(range(self.chips))

    @property
    def free_chips(self) -> tuple[int, ...]:
        """Chips that nobody holds; claimed ones among them."""
        held = {chip for holder in self.holders for chip in holder.chips}
        return tuple(chip for chip in range(self.chips) if chip not in held)

    @property
    def open(self) -> bool:
        """Whether chips of it may be taken, in so far as they are free."""
        return self.state in (LeaseState.INTENDED, LeaseState.READY)

    @property
    def parties(self) -> tuple[Holder | Claim, ...]:
        """All who have to show that they live."""
        return self.holders if self.claim is None else (*self.holders, self.claim)

    def holder(self, uid: str) -> Holder | None:
        """The holder with this uid; a run holds a slice once."""
        return next((holder for holder in self.holders if holder.uid == uid), None)

    def held_by_others(self, uid: str | None) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.uid != uid)


def intend(
    slice: str,
    pool: str,
    candidate: Candidate,
    chips: int,
    creator: str,
    now: float,
    holder: Holder | None = None,
    flavour: str = "",
) -> Lease:
    """The lease of a slice that is about to be asked for; its creator may hold chips of it from the first moment."""
    lease = Lease(slice, pool, candidate, chips, LeaseState.INTENDED, creator, now, flavour)
    return take(lease, holder, now) if holder is not None else lease


def admit(lease: Lease, order: int) -> Lease:
    """Write down the place of its creation among all of the pool's."""
    return replace(lease, order=order) if lease.order is None else lease


def ready(lease: Lease, now: float) -> Lease:
    """The cloud says that it is ready. Saying it twice changes nothing.

    Raises:
        LeaseRefused: it is quarantined or gone.
    """
    if lease.state is LeaseState.READY:
        return lease
    if lease.state is not LeaseState.INTENDED:
        raise _refused(lease, "become ready")
    return replace(
        lease,
        state=LeaseState.READY,
        ready=now,
        free_since=None if _used(lease.holders) else now,
    )


def take(lease: Lease, holder: Holder, now: float) -> Lease:
    """Give chips to a holder; its `since`, `term` and `beat` are set here. Of a slice in creation, too.

    A claim of lower priority on them gives way.

    Raises:
        LeaseRefused: a chip is held or claimed, the slice is not to be taken any more, or the holder has it already.
    """
    if not lease.open:
        raise _refused(lease, "be taken")
    if lease.holder(holder.uid) is not None:
        raise LeaseRefused(f"{lease.slice}: {holder.run} holds it already")
    wrong = [chip for chip in holder.chips if not 0 <= chip < lease.chips]
    if wrong or len(set(holder.chips)) != len(holder.chips):
        raise LeaseRefused(f"{lease.slice} has chips 0 to {lease.chips - 1}, found {list(holder.chips)}")
    if (other := _overlapping(lease.holders, holder.chips)) is not None:
        raise LeaseRefused(f"{lease.slice}: {other.run} holds chips {_list(other.chips)}")
    claim = lease.claim
    if claim is not None and ends_with(claim, holder):
        claim = None
    if claim is not None and not may_borrow(claim, holder.priority, holder.chips):
        raise LeaseRefused(f"{lease.slice}: chips {_list(claim.chips)} are claimed by {claim.run}")
    term, spans = lease.term + 1, _with_idle_span(lease, now) if holder.chips else lease.spans
    given = replace(holder, chips=tuple(sorted(holder.chips)), since=now, term=term, beat=0)
    return _folded(
        replace(
            lease,
            holders=(*lease.holders, given),
            claim=claim,
            term=term,
            free_since=None if holder.chips else lease.free_since,
            spans=spans,
        )
    )


def ends_with(claim: Claim, taker: Holder) -> bool:
    """Whether a claim is fulfilled by who takes chips, or gives way to them for being of lower priority."""
    overlaps = set(claim.chips) & set(taker.chips)
    return claim.uid == taker.uid or (claim.priority < taker.priority and bool(overlaps))


def may_borrow(claim: Claim, priority: int, chips: Collection[int]) -> bool:
    """Whether another run than the claimer may have free chips in spite of a claim."""
    if not set(claim.chips) & set(chips):
        return True
    return not claim.due and priority < claim.priority


def renew(lease: Lease, uid: str, term: int, now: float, priority: int | None = None) -> Lease:
    """Show that a holder lives. `now` is not kept: a beat is compared with the observer's own clock.

    With a `priority` the holder has that one from now on.

    Raises:
        LeaseRefused: it holds nothing of this slice any more; the message says who does.
    """
    holder = lease.holder(uid)
    if holder is None or holder.term != term:
        told = ", ".join(f"{h.run} holds chips {_list(h.chips)}" for h in lease.holders) or "nobody holds it"
        raise LeaseRefused(f"the lease of {lease.slice} is lost: {told}; it is {lease.state.value}")
    priority = holder.priority if priority is None else priority
    return _with_holder(lease, replace(holder, beat=holder.beat + 1, priority=priority))


def renew_claim(lease: Lease, uid: str) -> Lease:
    """Show that a claimer lives.

    Raises:
        LeaseRefused: it has no claim any more.
    """
    if lease.claim is None or lease.claim.uid != uid:
        raise LeaseRefused(f"the claim on {lease.slice} is lost")
    return replace(lease, claim=replace(lease.claim, beat=lease.claim.beat + 1))


def release(lease: Lease, uid: str, now: float) -> Lease:
    """Give chips back. Who holds none changes nothing: an answer may have been lost on its way."""
    holder = lease.holder(uid)
    return lease if holder is None else _without(lease, holder, now)


def drop(lease: Lease, silent: Holder | Claim, now: float) -> Lease:
    """Take chips or a claim from who has been silent for LEASE_TTL_S, as it was seen.

    Whoever takes these chips confirms on the hosts that nothing of the holder runs there any more.

    Raises:
        LeaseRefused: it has beaten meanwhile, or is no more.
    """
    if isinstance(silent, Claim):
        if lease.claim != silent:
            raise LeaseRefused(f"{lease.slice}: the claim of {silent.run} was renewed or is gone")
        return replace(lease, claim=None)
    if lease.holder(silent.uid) != silent:
        raise LeaseRefused(f"{lease.slice}: {silent.run} has renewed its lease or given it back")
    return _without(lease, silent, now)


def claim(lease: Lease, wanted: Claim, now: float) -> Lease:
    """Ask for chips that others hold, or keep free ones for later.

    Raises:
        LeaseRefused: the slice is not to be taken any more, another claim is as important, or it is due and a
            holder of these chips is as important.
    """
    if not lease.open:
        raise _refused(lease, "be claimed")
    other = lease.claim
    if other is not None and other.uid != wanted.uid and other.priority >= wanted.priority:
        raise LeaseRefused(f"{lease.slice}: {other.run} has claimed it with priority {other.priority}")
    if wanted.due:
        for holder in lease.held_by_others(wanted.uid):
            if set(holder.chips) & set(wanted.chips) and holder.priority >= wanted.priority:
                raise LeaseRefused(
                    f"{lease.slice}: {holder.run} of priority {holder.priority} is not evicted for {wanted.priority}"
                )
    mine = other if other is not None and other.uid == wanted.uid else None
    return replace(
        lease,
        claim=replace(
            wanted,
            chips=tuple(sorted(wanted.chips)),
            since=mine.since if mine and mine.due == wanted.due else now,
            beat=mine.beat + 1 if mine else 0,
        ),
    )


def unclaim(lease: Lease, uid: str) -> Lease:
    """Give a claim back; who has none changes nothing."""
    return replace(lease, claim=None) if lease.claim is not None and lease.claim.uid == uid else lease


def quarantine(lease: Lease, why: str) -> Lease:
    """Nobody may take it any more. Who holds chips of it may go on; the last one to leave deletes it.

    Raises:
        LeaseRefused: it is gone.
    """
    if lease.state is LeaseState.GONE:
        raise _refused(lease, "be quarantined")
    if lease.state is LeaseState.QUARANTINED:
        return lease
    return replace(lease, state=LeaseState.QUARANTINED, claim=None, why=why)


def retire(lease: Lease, why: str, by: str | None = None) -> Lease:
    """`quarantine` a slice that is to be deleted: refused while anybody but `by` holds or claims it.

    Raises:
        LeaseRefused: it is held, claimed or gone.
    """
    _check_not_held(lease, by)
    if lease.claim is not None and lease.claim.uid != by:
        raise LeaseRefused(f"{lease.slice} is claimed by {lease.claim.run}")
    return quarantine(lease, why)


def close(lease: Lease, why: str, now: float) -> Lease:
    """End whatever is held of a slice that the cloud has taken away, and let nobody take it any more.

    Raises:
        LeaseRefused: it is gone.
    """
    return quarantine(_without_all(lease, now), why)


def gone(lease: Lease, why: str, now: float, by: str | None = None, *, lost: bool = False) -> Lease:
    """The cloud has confirmed that the slice is no more: whatever was held is over.

    `lost` says that the cloud took it away; else nobody but `by` may hold it, since it would have been deleted
    under a holder's feet.

    Raises:
        LeaseRefused: somebody else holds it.
    """
    if lease.state is LeaseState.GONE:
        return lease
    if not lost:
        _check_not_held(lease, by)
    lease = _without_all(lease, now)
    lease = _folded(replace(lease, spans=_with_idle_span(lease, now)))
    return replace(lease, state=LeaseState.GONE, claim=None, free_since=None, gone=now, why=lease.why or why)


class LeaseObserver:
    """Tells who has been silent for LEASE_TTL_S, by the observer's own monotonic clock. No I/O.

    It counts only while it looks: who has not looked for LONGEST_GAP_S (a bucket that did not answer, a machine that
    slept) begins anew.
    """

    def __init__(self, ttl_s: float = LEASE_TTL_S, gap_s: float = LONGEST_GAP_S) -> None:
        self._ttl_s = ttl_s
        self._gap_s = gap_s
        # Of each slice: who was seen with which beat, since when, and when the slice was looked at last.
        self._since: dict[str, dict[tuple[str, int, int], float]] = {}
        self._looked: dict[str, float] = {}

    def see(self, lease: Lease, monotonic: float) -> tuple[Holder | Claim, ...]:
        """Look at a lease: the holders, and maybe the claim, that may be dropped from it."""
        if lease.state is LeaseState.GONE:
            self.forget(lease.slice)
            return ()
        before = self._since.get(lease.slice, {})
        if monotonic - self._looked.get(lease.slice, monotonic) > self._gap_s:
            before = {}
        self._looked[lease.slice] = monotonic
        since = {beat: before.get(beat, monotonic) for beat in map(beat_of, lease.parties)}
        self._since[lease.slice] = since
        return tuple(p for p in lease.parties if monotonic - since[beat_of(p)] >= self._ttl_s)

    def see_all(self, leases: Iterable[Lease], monotonic: float) -> dict[str, tuple[Holder | Claim, ...]]:
        """Look at many: who may be dropped, by slice; slices without such are left out."""
        seen = {lease.slice: self.see(lease, monotonic) for lease in leases}
        return {name: silent for name, silent in seen.items() if silent}

    def forget(self, slice: str) -> None:
        self._since.pop(slice, None)
        self._looked.pop(slice, None)


def idle_chip_seconds(lease: Lease, now: float) -> float:
    """Chip-seconds since it became ready that no run had."""
    if lease.ready is None:
        return 0.0
    end = lease.gone if lease.gone is not None else now
    return max(0.0, (end - lease.ready) * lease.chips - sum(used_chip_seconds(lease, now).values()))


def used_chip_seconds(lease: Lease, now: float) -> dict[str, float]:
    """Chip-seconds since it became ready, by run; those of uses that are not kept one by one are under OLDER."""
    found: dict[str, float] = {OLDER: lease.older_used_s} if lease.older_used_s else {}
    begin = lease.ready if lease.ready is not None else now
    uses = [(s.run, s.chips, s.start, s.end) for s in lease.spans if s.run is not None]
    uses += [(h.run, h.chips, h.since, now) for h in lease.holders]
    for run, chips, start, end in uses:
        found[run] = found.get(run, 0.0) + max(0.0, end - max(start, begin)) * len(chips)
    return found


def to_json(lease: Lease) -> bytes:
    """The content of the lease's object."""
    body = asdict(lease) | {"format": 1, "state": lease.state.value}
    return json.dumps(body).encode()


def from_json(data: bytes) -> Lease:
    """The lease that `to_json` wrote.

    Raises:
        MalformedLease: it is not that.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        body.pop("format")
        return Lease(
            **body
            | {
                "candidate": Candidate(**body["candidate"]),
                "state": LeaseState(body["state"]),
                "holders": tuple(Holder(**_tuple_chips(h)) for h in body["holders"]),
                "claim": Claim(**_tuple_chips(body["claim"])) if body["claim"] else None,
                "spans": tuple(Span(**_tuple_chips(s)) for s in body["spans"]),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedLease(f"a lease cannot be understood ({error!r}): {data[:200]!r}") from error


def _tuple_chips(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"chips": tuple(values["chips"])}


def _used(holders: Iterable[Holder]) -> bool:
    return any(holder.chips for holder in holders)


def _overlapping(holders: Iterable[Holder], chips: Collection[int]) -> Holder | None:
    wanted = set(chips)
    return next((holder for holder in holders if wanted & set(holder.chips)), None)


def _with_holder(lease: Lease, holder: Holder) -> Lease:
    return replace(lease, holders=tuple(holder if h.uid == holder.uid else h for h in lease.holders))


def _without(lease: Lease, holder: Holder, now: float) -> Lease:
    left = tuple(h for h in lease.holders if h.uid != holder.uid)
    spans, free_since = lease.spans, lease.free_since
    if holder.chips:
        spans = (*spans, Span(holder.run, holder.chips, holder.since, now))
        if not _used(left) and lease.ready is not None:
            free_since = now
    return _folded(replace(lease, holders=left, spans=spans, free_since=free_since))


def _without_all(lease: Lease, now: float) -> Lease:
    for holder in lease.holders:
        lease = _without(lease, holder, now)
    return lease


def _check_not_held(lease: Lease, by: str | None) -> None:
    if others := lease.held_by_others(by):
        raise LeaseRefused(f"{lease.slice} is held by {', '.join(h.run for h in others)}")


def _with_idle_span(lease: Lease, now: float) -> tuple[Span, ...]:
    if lease.free_since is None or lease.free_since >= now:
        return lease.spans
    return (*lease.spans, Span(None, lease.all_chips, lease.free_since, now))


def _folded(lease: Lease) -> Lease:
    """Keep the newest spans, and of the older ones their sums from the moment on when the slice was ready."""
    surplus = len(lease.spans) - MOST_SPANS
    if surplus <= 0:
        return lease
    begin = lease.ready if lease.ready is not None else float("inf")
    used, idle = lease.older_used_s, lease.older_idle_s
    for span in lease.spans[:surplus]:
        seconds = max(0.0, span.end - max(span.start, begin)) * len(span.chips)
        used, idle = (used, idle + seconds) if span.run is None else (used + seconds, idle)
    return replace(lease, spans=lease.spans[surplus:], older_used_s=used, older_idle_s=idle)


def beat_of(party: Holder | Claim) -> tuple[str, int, int]:
    """What stays the same while a party is silent."""
    # A claim has no term; -1 keeps it apart from the holder that the same run may be.
    return party.uid, party.term if isinstance(party, Holder) else -1, party.beat


def _refused(lease: Lease, what: str) -> LeaseRefused:
    why = f" ({lease.why})" if lease.why else ""
    return LeaseRefused(f"{lease.slice} cannot {what}: it is {lease.state.value}{why}")


def _list(chips: Iterable[int]) -> str:
    return ",".join(map(str, chips)) or "none"
