"""Who takes part in which steps: one pure function of (now, state, options), which also says why.

Members are told of tables for steps [first, until) some time before the first of them reaches `until`, so that the
steady state waits for nobody. A lost member's units go to the others in the tables that hold; a new one gets units from
the first step that no table covers yet. Times are in seconds of the coordinator's monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tpu.elastic.table import Table, deal, table_of, without

# Why a member is out that has done all there was to do.
FINISHED = "it has finished"


class Phase(str, Enum):
    JOINING = "joining"  # compiles, loads, or follows a peer
    READY = "ready"  # has the state after `step` steps, and keeps up
    IN = "in"  # is in a table


@dataclass(frozen=True)
class Options:
    """`expect` members begin at once, `least` of them after `form_s`. A closed connection is a loss after
    `reconnect_s`, silence after `silent_s`, no progress while others wait for it after `stuck_s`.
    """

    units: int
    expect: int = 1
    names: tuple[str, ...] = ()  # of the slices that are expected, so that who is missing can be named
    least: int = 1
    form_s: float = 60.0
    reconnect_s: float = 1.0
    silent_s: float = 10.0
    stuck_s: float = 60.0
    ahead_s: float = 2.0  # tables reach so far ahead
    ahead_steps_least: int = 2
    ahead_steps_most: int = 1000
    last_step: int = 2**31


@dataclass(frozen=True)
class Member:
    """What a member has said of itself. `step`: steps whose sums it has applied."""

    id: int
    slice: str
    phase: Phase
    step: int
    seen_at: float
    closed_at: float | None = None
    unit_s: float | None = None
    follows: bool = False  # takes what it lacks from a peer, and has all there is so far
    awaits: frozenset[int] = frozenset()
    awaits_s: float = 0.0
    broken: frozenset[int] = frozenset()  # peers it has no connection to
    hashes: Mapping[int, str] = field(default_factory=dict)  # of the state after some steps


@dataclass(frozen=True)
class State:
    """What the coordinator knows. `version` rises whenever members have something new to hear."""

    term: int = 1
    version: int = 0
    next_id: int = 0
    members: Mapping[int, Member] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    forming_since: float | None = None
    step_s: float | None = None
    progress: tuple[float, int] | None = None  # when the furthest step was reached
    quarantined: Mapping[str, str] = field(default_factory=dict)  # slices whose state differed, and why
    committed: int = 0
    lost_version: int = 0  # of the tables since the last loss: what members waited for before is of the past
    adopted: tuple[int, int] | None = (
        None  # (term, version) of the tables taken over from an earlier coordinator
    )


@dataclass(frozen=True)
class Evicted:
    """A member that is out. `quarantined`: its slice may not come back; `final`: nor may this process, since its state
    is in doubt."""

    id: int
    slice: str
    step: int
    why: str
    quarantined: bool = False
    final: bool = False


@dataclass(frozen=True)
class Decision:
    state: State
    evicted: tuple[Evicted, ...]
    reason: str


def decide(now: float, state: State, options: Options) -> Decision:
    """What follows from what is known at `now`. `reason` says how things stand, also when nothing changes."""
    evicted: list[Evicted] = []
    reasons: list[str] = []
    for out in _lost(now, state, options):
        if out.id in state.members:
            evicted.append(out)
            reasons.append(f"{out.slice} (member {out.id}) is out at step {out.step}: {out.why}")
            state = _remove(state, out)
    state = _measure(now, state)
    state = _forget_past(state)
    if not state.tables:
        state, reason = _form(now, state, options)
    else:
        state, reason = _extend(state, options)
    if reason:
        reasons.append(reason)
    return Decision(state, tuple(evicted), "; ".join(reasons))


def _lost(now: float, state: State, options: Options) -> list[Evicted]:
    found: list[Evicted] = []
    for member in state.members.values():
        why = None
        if now - member.seen_at > options.silent_s:
            why = f"no word from it for {options.silent_s:g} s"
        elif member.closed_at is not None:
            away = now - member.closed_at
            # Its connections to us and to a peer are gone: two witnesses.
            witnesses = [m.id for m in state.members.values() if member.id in m.broken]
            if member.step >= options.last_step:
                why = FINISHED
            elif witnesses or away > options.reconnect_s:
                why = "its connections are closed" if witnesses else "its connection is closed"
        if why is not None:
            found.append(Evicted(member.id, member.slice, member.step, why))
    return found + _odd_ones(state) + ([] if found else _stuck(state, options))


def _odd_ones(state: State) -> list[Evicted]:
    """Members whose state differs from that of most others after the same step."""
    found: list[Evicted] = []
    inside = [m for m in state.members.values() if m.phase is Phase.IN]
    steps = {step for member in inside for step in member.hashes}
    for step in sorted(steps):
        told = {m.id: m.hashes[step] for m in inside if step in m.hashes}
        counts = Counter(told.values())
        common, most = counts.most_common(1)[0]
        outstanding = sum(m.step < step for m in inside)
        agreed = 2 * most > len(told) + outstanding
        if len(counts) == 1 or not (agreed or not outstanding):
            continue
        # Two against one are proof; one against one is none, and a right state cannot be told from a wrong one.
        for member in (state.members[i] for i, digest in told.items() if not agreed or digest != common):
            why = (
                f"its state after step {step} differs from that of {most} of {len(told)} members"
                if agreed
                else f"states after step {step} differ and no more than half of {len(told)} members agree"
            )
            found.append(Evicted(member.id, member.slice, member.step, why, agreed, final=True))
        break
    return found


def _stuck(state: State, options: Options) -> list[Evicted]:
    """Whom others have waited for too long while it waits for nobody; or one end of a dead connection."""
    waiting = [m for m in state.members.values() if m.awaits and m.awaits_s > options.stuck_s]
    awaited = {i for member in waiting for i in member.awaits if i in state.members}
    for i in sorted(awaited):
        member, table = state.members[i], table_of(state.tables, state.members[i].step)
        own = len(table.units_of(i)) * (member.unit_s or 0.0) if table is not None else 0.0
        longest = max(m.awaits_s for m in waiting if i in m.awaits)
        if not member.awaits and longest > options.stuck_s + 2 * own:
            why = f"others have waited for it for {longest:.1f} s and it waits for nobody"
            return [Evicted(i, member.slice, member.step, why)]
    broken = Counter(i for m in state.members.values() for i in (*m.broken, *([m.id] if m.broken else [])))
    if waiting and broken:
        worst = max(broken, key=lambda i: (broken[i], i))
        if worst in state.members:
            member = state.members[worst]
            return [Evicted(worst, member.slice, member.step, "it and a peer cannot reach each other")]
    return []


def _remove(state: State, out: Evicted) -> State:
    members = {
        i: replace(member, awaits=frozenset(), awaits_s=0.0)
        for i, member in state.members.items()
        if i != out.id
    }
    seconds = unit_seconds(members)
    tables = []
    for table in state.tables:
        if out.id not in table.members:
            tables.append(table)
        elif len(table.members) > 1:
            tables.append(without(table, out.id, seconds))
    quarantined = {**state.quarantined, **({out.slice: out.why} if out.quarantined else {})}
    if any(out.id in table.members and len(table.members) == 1 for table in state.tables):
        tables = []  # nobody holds the state any more: it is formed anew from the last commit
    return replace(
        state, members=members, tables=tuple(tables), quarantined=quarantined,
        version=state.version + 1, lost_version=state.version + 1,
        forming_since=state.forming_since if tables else None,
    )  # fmt: skip


def unit_seconds(members: Mapping[int, Member]) -> dict[int, float]:
    """Seconds a unit of those that have measured it; the slowest of them stands for the others."""
    known = {i: m.unit_s for i, m in members.items() if m.unit_s is not None and m.unit_s > 0}
    guess = max(known.values(), default=1.0)
    return {i: known.get(i, guess) for i in members}


def _measure(now: float, state: State) -> State:
    """How long a step takes, from when the furthest member got how far."""
    if not state.tables:
        return replace(state, progress=None)
    step = max((m.step for m in state.members.values()), default=0)
    if state.progress is None:
        return replace(state, progress=(now, step))
    since, before = state.progress
    if step <= before:
        return state
    latest = (now - since) / (step - before)
    step_s = latest if state.step_s is None else 0.7 * state.step_s + 0.3 * latest
    return replace(state, progress=(now, step), step_s=step_s)


def _forget_past(state: State) -> State:
    """Drop tables whose steps every member in them has applied, and hashes that all have told."""
    tables = tuple(
        table
        for table in state.tables
        if table is state.tables[-1]
        or any(state.members[i].step < table.until for i in table.members if i in state.members)
    )
    return replace(state, tables=tables)


def _form(now: float, state: State, options: Options) -> tuple[State, str]:
    """The first table, when enough members are ready."""
    ready = {i: m for i, m in state.members.items() if m.phase is Phase.READY and m.closed_at is None}
    if not ready:
        return replace(state, forming_since=None), ""
    since = state.forming_since if state.forming_since is not None else now
    state = replace(state, forming_since=since)
    step = max(m.step for m in ready.values())
    first = {i: m for i, m in ready.items() if m.step == step}
    enough = len(first) >= options.expect or (len(first) >= options.least and now - since >= options.form_s)
    if not enough:
        there = {m.slice for m in first.values()}
        missing = options.expect - len(first)
        away = [name for name in options.names if not any(_is_of(name, one) for one in there)]
        who = f": {', '.join(away)}" if away else ""
        names = ", ".join(sorted(there))
        return state, f"{missing} of {options.expect} members missing{who}; ready at step {step}: {names}"
    table = deal(
        step, min(step + options.ahead_steps_least, options.last_step), unit_seconds(first), options.units
    )
    members = {i: replace(m, phase=Phase.IN) if i in first else m for i, m in state.members.items()}
    told = replace(state, members=members, tables=(table,), version=state.version + 1)
    return told, f"{len(first)} members begin at step {step}"


def _is_of(name: str, slice_name: str) -> bool:
    return slice_name == name or slice_name.startswith(f"{name} ")


def _extend(state: State, options: Options) -> tuple[State, str]:
    """The next table, when somebody comes near the end of the last one."""
    last = state.tables[-1]
    inside = {i: m for i, m in state.members.items() if m.phase is Phase.IN}
    furthest = max((m.step for m in inside.values()), default=last.first)
    ahead = options.ahead_steps_least
    if state.step_s is not None and state.step_s > 0:
        ahead = min(max(math.ceil(options.ahead_s / state.step_s), ahead), options.ahead_steps_most)
    if last.until >= options.last_step or last.until - furthest > ahead / 2:
        return state, ""
    arrived = {
        i: m
        for i, m in state.members.items()
        if m.phase is Phase.READY and m.follows and m.closed_at is None and m.step <= last.until
    }
    taking = inside | arrived
    until = min(max(furthest, last.until - 1) + ahead, options.last_step)
    table = deal(last.until, max(until, last.until + 1), unit_seconds(taking), options.units)
    members = {i: replace(m, phase=Phase.IN) if i in arrived else m for i, m in state.members.items()}
    told = replace(state, members=members, tables=(*state.tables, table), version=state.version + 1)
    names = ", ".join(m.slice for m in arrived.values())
    return told, f"{names} from step {last.until} on" if arrived else ""
