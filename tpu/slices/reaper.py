"""Which slices of a project nobody needs any more. Pure: what was seen goes in, deletions with reasons come out.

The cloud is listed before the leases are read: a slice's lease is written before the slice is asked for, so one that
shows in the cloud and has no lease has none for good. What is not provably ours and unused is left alone, and said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tpu.cloud import Node, QueuedResource
from tpu.slices import pool_size
from tpu.slices.condition import look_of, view
from tpu.slices.labels import BUCKET_LABEL, RUN_LABEL, bucket_label, is_ours
from tpu.slices.lease import Claim, Holder, Lease, LeaseState
from tpu.slices.pool_settings import PoolSettings

# An intent that nobody holds: its creation may be on its way for the first time, and be waited for during the second.
FRESH_INTENT_S, LONGEST_CREATION_S = 180.0, 5400.0


class Driver(Enum):
    """Whether the run that a slice was made for is driven by a process that lives."""

    ALIVE = "alive"
    SILENT = "silent"
    NONE = "none"  # no such run in this bucket


@dataclass(frozen=True)
class Sighting:
    """A slice as the lists of the cloud show it: queued resource, node, or both, of one name."""

    name: str
    zone: str
    queued_resource: QueuedResource | None
    node: Node | None

    @property
    def labels(self) -> Mapping[str, str]:
        # The node's own labels count: it may exist without its queued resource, and the other way round.
        known = self.node or self.queued_resource
        return known.labels if known is not None else {}

    @property
    def what(self) -> str:
        """Such as `spot v4-8, queued resource ACTIVE, node READY`."""
        known = self.node or self.queued_resource
        kind = known.accelerator_type if known is not None else ""
        parts = [f"spot {kind}" if known is not None and known.spot else kind]
        if self.queued_resource is not None:
            parts.append(f"queued resource {self.queued_resource.state.name}")
        if self.node is not None:
            parts.append(f"node {self.node.state.name}")
        return ", ".join(parts)

    @property
    def usable(self) -> bool:
        """Whether the cloud says that it is ready."""
        return view(look_of(self.queued_resource, self.node, spot=True, was_ready=False)).usable

    def dead(self, was_ready: bool) -> str | None:
        """Why it will never be usable again; None if nothing says so. UNKNOWN is not dead."""
        look = look_of(self.queued_resource, self.node, spot=True, was_ready=was_ready)
        seen = view(look)
        return seen.reason if seen.lost else None


@dataclass(frozen=True)
class Facts:
    """What is known besides the cloud's lists, read after them.

    `leases` are those of slices that are not gone, and of all that the cloud shows, by slice. `damaged` has what is
    wrong with leases that cannot be read, `silent` who of holders and claimers was watched and did not beat,
    `drivers` the state of runs by their label. `bucket` is the one whose slices are ours.
    """

    bucket: str
    leases: Mapping[str, Lease]
    settings: Mapping[str, PoolSettings]
    silent: Mapping[str, Collection[Holder | Claim]]
    drivers: Mapping[str, Driver]
    damaged: Mapping[str, str]
    now: float


@dataclass(frozen=True)
class Deletion:
    """A slice that is to go. `drop` are the silent parties that are ended in its lease first."""

    sighting: Sighting
    reason: str
    lease: Lease | None = None
    drop: tuple[Holder | Claim, ...] = ()
    dead: bool = False

    @property
    def saves_an_hour(self) -> float | None:
        """US dollars an hour that it costs while it stays; None if its price is not known."""
        if self.dead or self.sighting.node is None:
            return 0.0  # the dead use up quota, and cost nothing; so does what is not there yet
        return self.lease.candidate.price_an_hour if self.lease is not None else None


@dataclass(frozen=True)
class Forgotten:
    """A lease whose slice the cloud's lists do not show: to be marked gone once the cloud confirms that."""

    lease: Lease
    reason: str
    drop: tuple[Holder | Claim, ...] = ()


@dataclass(frozen=True)
class Left:
    """A slice that is left alone, and why. `doubtful` if a person should look at it."""

    name: str
    zone: str
    what: str
    reason: str
    doubtful: bool = False


@dataclass(frozen=True)
class Plan:
    """What is to be done. `arrived` are leases of slices that have become ready while nobody watched them;
    `strangers` counts slices that carry none of our labels."""

    deletions: tuple[Deletion, ...]
    forgotten: tuple[Forgotten, ...]
    left: tuple[Left, ...]
    arrived: tuple[Lease, ...]
    strangers: int


def sightings(nodes: Iterable[Node], queued: Iterable[QueuedResource]) -> list[Sighting]:
    """Queued resources and nodes joined by zone and name, which our slices have in common."""
    found: dict[tuple[str, str], Sighting] = {}
    for one in queued:
        found[one.zone, one.name] = Sighting(one.name, one.zone, one, None)
    for node in nodes:
        key = (node.zone, node.name)
        found[key] = replace(found.get(key, Sighting(node.name, node.zone, None, None)), node=node)
    return [found[key] for key in sorted(found)]


def runs_to_watch(seen: Iterable[Sighting], facts: Facts, pool: str | None = None) -> set[str]:
    """Labels of runs whose drivers decide, since no lease that can be read does."""
    return {
        one.labels[RUN_LABEL]
        for one in seen
        if one.name not in facts.leases
        and _is_of_bucket(one, facts) is not False
        and is_ours(one.labels, pool)
        and RUN_LABEL in one.labels
    }


def plan(
    seen: Sequence[Sighting], facts: Facts, zones_seen: Collection[str], pool: str | None = None
) -> Plan:
    """What is to go and what is left, of one pool or of all.

    `zones_seen` are those that the cloud has answered for: only there does a slice that does not show count as absent.
    """
    ours = [one for one in seen if is_ours(one.labels, pool)]
    deletions: list[Deletion] = []
    left: list[Left] = []
    undecided: list[Sighting] = []
    for one in ours:
        match _judge(one, facts):
            case Deletion() as deletion:
                deletions.append(deletion)
            case Left() as reason:
                left.append(reason)
            case None:
                undecided.append(one)
    names = {one.name for one in seen}
    doomed = {one.sighting.name for one in deletions}
    forgotten = [
        found
        for lease in facts.leases.values()
        if lease.slice not in names
        and lease.candidate.zone in zones_seen
        and pool in (None, lease.pool)
        and (found := _absent(lease, facts)) is not None
    ]
    doomed |= {one.lease.slice for one in forgotten}
    coming = {one.name: facts.leases[one.name] for one in undecided if one.usable}
    arrived = {name: lease for name, lease in coming.items() if lease.state is LeaseState.INTENDED}
    too_many = _surplus(facts, doomed | arrived.keys())
    for one in undecided:
        lease = facts.leases[one.name]
        reason = too_many.get(one.name)
        if one.name in arrived:
            left.append(_left(one, f"has become ready, free for the pool {lease.pool} from now on"))
        elif reason is not None:
            deletions.append(Deletion(one, reason, lease, _silent(lease, facts)))
        else:
            left.append(_left(one, _why_kept(lease, facts)))
    strangers = sum(not is_ours(one.labels) for one in seen)
    return Plan(tuple(deletions), tuple(forgotten), tuple(left), tuple(arrived.values()), strangers)


def _judge(one: Sighting, facts: Facts) -> Deletion | Left | None:
    """The fate of a slice as far as it depends on it alone; None if it is one of the pool's free slices."""
    if _is_of_bucket(one, facts) is False:
        return _left(one, f"it belongs to the bucket {one.labels[BUCKET_LABEL]}")
    lease = facts.leases.get(one.name)
    if lease is None:
        return _judge_without_lease(one, facts)
    dead = one.dead(was_ready=lease.ready is not None)
    silent = _silent(lease, facts)
    living = [holder for holder in lease.holders if holder not in silent]
    if lease.state is LeaseState.GONE:
        return Deletion(one, f"its lease says that it is gone ({lease.why})", lease, dead=dead is not None)
    if living:
        end = f", which has still to see that {dead}" if dead else ""
        return _left(one, f"held by {', '.join(holder.run for holder in living)}{end}")
    if dead:
        return Deletion(one, dead, lease, silent, dead=True)
    if lease.holders:
        return Deletion(
            one, f"{', '.join(h.run for h in lease.holders)} holds it and is silent", lease, silent
        )
    if lease.state is LeaseState.QUARANTINED:
        return Deletion(one, f"quarantined: {lease.why}", lease, silent)
    if lease.claim is not None and lease.claim not in silent:
        return _left(one, f"kept for {lease.claim.run}")
    return None


def _judge_without_lease(one: Sighting, facts: Facts) -> Deletion | Left:
    dead = one.dead(was_ready=False)
    driver = facts.drivers.get(one.labels.get(RUN_LABEL, ""), Driver.NONE)
    run = one.labels.get(RUN_LABEL)
    if driver is Driver.ALIVE:
        return _left(one, f"its run {run} is driven by a process that lives")
    if (damage := facts.damaged.get(one.name)) is not None:
        if dead:
            return Deletion(one, f"{dead}, and its lease is damaged", dead=True)
        return _left(
            one, f"{damage}. If nobody needs the slice, delete it by hand, then the lease", doubtful=True
        )
    if _is_of_bucket(one, facts) is None and driver is Driver.NONE:
        return _left(
            one, "nothing says that it was made from this bucket; delete it by hand if nobody needs it",
            doubtful=True,
        )  # fmt: skip
    if dead:
        return Deletion(one, dead, dead=True)
    if driver is Driver.SILENT:
        return Deletion(one, f"its run {run} has no driver any more, and it has no lease")
    return Deletion(one, "no lease knows it")


def _is_of_bucket(one: Sighting, facts: Facts) -> bool | None:
    """Whether it was made from our bucket; None if it does not say."""
    made = one.labels.get(BUCKET_LABEL)
    return None if made is None else made == bucket_label(facts.bucket)


def _absent(lease: Lease, facts: Facts) -> Forgotten | None:
    """What becomes of a lease whose slice does not show."""
    silent = _silent(lease, facts)
    if lease.state is LeaseState.GONE or any(holder not in silent for holder in lease.holders):
        return None
    if lease.state is LeaseState.INTENDED and not lease.holders:
        if facts.now - lease.created < FRESH_INTENT_S:
            return None
        return Forgotten(lease, "it was never asked for", silent)
    return Forgotten(lease, "the cloud no longer knows it", silent)


def _surplus(facts: Facts, doomed: Collection[str]) -> dict[str, str]:
    """Free slices that their pools do not keep, with the reason."""
    pools: dict[str, list[Lease]] = {}
    for lease in facts.leases.values():
        if lease.open and lease.slice not in doomed:
            claim = None if lease.claim in facts.silent.get(lease.slice, ()) else lease.claim
            pools.setdefault(lease.pool, []).append(replace(lease, claim=claim))
    found: dict[str, str] = {}
    for pool, leases in pools.items():
        settings = facts.settings.get(pool, PoolSettings())
        for name in pool_size.idle_too_long(leases, settings, facts.now):
            idle = facts.now - (facts.leases[name].free_since or facts.now)
            found[name] = f"idle for {idle / 60:.0f} min, kept for {settings.idle_minutes:g} (idle_minutes)"
        open_count = len(leases) - len([one for one in leases if one.slice in found])
        coming = [
            one for one in leases if one.state is LeaseState.INTENDED and not one.holders and not one.claim
        ]
        for lease in sorted(coming, key=lambda one: -one.created):
            age = facts.now - lease.created
            if age >= LONGEST_CREATION_S:
                found[lease.slice] = f"asked for {age / 60:.0f} min ago, not ready, and nobody waits for it"
            elif age >= FRESH_INTENT_S and open_count > settings.min_slices:
                found[lease.slice] = "on its way, and nobody waits for it"
            else:
                continue
            open_count -= 1
    return found


def _why_kept(lease: Lease, facts: Facts) -> str:
    settings = facts.settings.get(lease.pool, PoolSettings())
    if lease.state is LeaseState.INTENDED:
        return f"on its way for the pool {lease.pool}"
    idle = facts.now - (lease.free_since if lease.free_since is not None else facts.now)
    if idle < settings.idle_minutes * 60:
        return f"free for {idle / 60:.0f} of {settings.idle_minutes:g} min (idle_minutes)"
    return f"free, one of the {settings.min_slices} that the pool {lease.pool} keeps (min_slices)"


def _silent(lease: Lease, facts: Facts) -> tuple[Holder | Claim, ...]:
    return tuple(facts.silent.get(lease.slice, ()))


def _left(one: Sighting, reason: str, *, doubtful: bool = False) -> Left:
    return Left(one.name, one.zone, one.what, reason, doubtful)
