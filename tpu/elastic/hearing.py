"""How what members say changes what the coordinator knows: pure functions of (state, now, message)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpu.elastic.rules import Member, Phase, State
from tpu.elastic.table import Table

# Hashes of so many of a member's last steps are compared.
_HASHES_KEPT = 4


def joined(state: State, now: float, slice_name: str) -> tuple[State, int]:
    """A new member; it has an identity of its own, so that no process can pose as an earlier one."""
    member = Member(state.next_id, slice_name, Phase.JOINING, 0, now)
    members = {**state.members, member.id: member}
    return replace(state, members=members, next_id=member.id + 1), member.id


def returned(
    state: State,
    now: float,
    member_id: int,
    slice_name: str,
    step: int,
    told: tuple[int, int],
    tables: Sequence[Table],
    names: Mapping[int, str] = {},
) -> State | None:
    """A member that had lost its connection, or whose coordinator is new; None if it is out.

    `told` is the (term, version) of the `tables` it has. A new coordinator knows nothing but what members tell it, and
    takes the newest of their tables. `names` are the slices of those in them.
    """
    if member_id in state.members:
        back = replace(state.members[member_id], closed_at=None, seen_at=now)
        return replace(state, members={**state.members, member_id: back})
    if told[0] >= state.term or (state.adopted is not None and told > state.adopted):
        state = _adopt(state, now, told, tables, names)
    elif told[0] == state.term or state.adopted is None:
        return None
    inside = any(member_id in table.members for table in state.tables)
    if not inside and member_id < state.next_id and any(member_id in table.members for table in tables):
        return None
    member = Member(member_id, slice_name, Phase.IN if inside else Phase.JOINING, step, now)
    members = {**state.members, member_id: member}
    return replace(state, members=members, next_id=max(state.next_id, member_id + 1))


def _adopt(
    state: State, now: float, told: tuple[int, int], tables: Sequence[Table], names: Mapping[int, str]
) -> State:
    """The tables of an earlier coordinator. Their members that are not here yet count as just gone."""
    others = {i for table in tables for i in table.members} - state.members.keys()
    absent = {i: Member(i, names.get(i, f"member {i}"), Phase.IN, 0, now, closed_at=now) for i in others}
    return replace(
        state,
        term=max(state.term, told[0] + 1),
        version=max(state.version, told[1]) + 1,
        tables=tuple(tables),
        adopted=told,
        members={**state.members, **absent},
        next_id=max([state.next_id, *(i + 1 for i in others)]),
    )


def reported(state: State, now: float, member_id: int, report: Mapping[str, object]) -> State:
    """What a member says regularly of itself, see `tpu.elastic.control.Report`."""
    member = state.members.get(member_id)
    if member is None:
        return state
    hashes = {int(step): str(digest) for step, digest in dict(report["hashes"]).items()}  # type: ignore[call-overload]
    seconds = report["unit_s"]
    phase = member.phase
    current = int(report["version"]) >= state.lost_version  # type: ignore[call-overload]
    if phase is not Phase.IN:
        phase = Phase.READY if report["ready"] else Phase.JOINING
        member = replace(member, follows=bool(report["follows"]))
    heard = replace(
        member,
        phase=phase,
        step=max(member.step, int(report["step"])),  # type: ignore[call-overload]
        seen_at=now,
        unit_s=float(seconds) if isinstance(seconds, int | float) else None,
        awaits=frozenset(report["awaits"] if current else ()),  # type: ignore[call-overload]
        awaits_s=float(report["awaits_s"] if current else 0.0),  # type: ignore[arg-type]
        broken=frozenset(report["broken"]),  # type: ignore[call-overload]
        hashes=dict(sorted({**member.hashes, **hashes}.items())[-_HASHES_KEPT:]),
    )
    committed = max(state.committed, int(report["committed"]))  # type: ignore[call-overload]
    version = state.version + (committed > state.committed)
    return replace(state, members={**state.members, member_id: heard}, committed=committed, version=version)


def closed(state: State, now: float, member_id: int) -> State:
    """A member's connection has ended."""
    member = state.members.get(member_id)
    if member is None:
        return state
    return replace(state, members={**state.members, member_id: replace(member, closed_at=now)})
