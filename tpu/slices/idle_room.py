"""Idle slices that take the place of one that a run waits for: which one, until when it is kept, how to free it. Pure.

Nobody deletes a slice for a run that cannot use it: whoever set idle_minutes has asked for it to be kept.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection

from tpu.slices.lease import LeaseState
from tpu.slices.pool_settings import PoolSettings
from tpu.slices.pool_shelves import Kind, Shelved, kind_of


class IdleRoom:
    """The idle ones among the open slices of a pool, by kind, those that are idle for longest first.

    A look costs no more than the kinds that the run wants, and whatever has been taken since the last one.
    """

    def __init__(self, slices: Collection[Shelved], settings: PoolSettings) -> None:
        self._settings = settings
        self._spare = len(slices) - settings.min_slices
        self._by_kind: dict[Kind, list[Shelved]] = {}
        for one in sorted(filter(_idle, slices), key=lambda one: one.lease.free_since or 0.0):
            self._by_kind.setdefault(kind_of(one.lease.candidate, one.lease.flavour), []).append(one)
        for idle in self._by_kind.values():
            idle.reverse()  # the last one is looked at first

    def sentence(self, kinds: Collection[Kind]) -> str | None:
        """About an idle slice of none of these kinds; None if there is none."""
        used_up: list[Kind] = []
        found = None
        for kind, idle in self._by_kind.items():
            if kind in kinds:
                continue
            while idle and not _idle(idle[-1]):  # taken or claimed by somebody earlier in this call
                idle.pop()
            if idle:
                found = idle[-1]
                break
            used_up.append(kind)
        for kind in used_up:
            del self._by_kind[kind]
        return self._told(found) if found is not None else None

    def _told(self, one: Shelved) -> str:
        lease, pool = one.lease, one.lease.pool
        told = f"{lease.slice} ({lease.candidate}) has a place, is idle and does not fit; it is kept "
        if self._spare <= 0:
            least = self._settings.min_slices
            told += (
                f"for min_slices {least}; to free its place: relay pool set {pool} --min-slices {least - 1} "
            )
        elif not self._settings.idle_minutes:
            return f"{told}until the next `relay reap --pool {pool}`"
        else:
            end = (lease.free_since or 0.0) + self._settings.idle_minutes * 60
            told += f"until {_time(end)} (idle_minutes); to free its place now: relay pool set {pool} "
        return f"{told}--idle-minutes 0, then relay reap --pool {pool}"


def _idle(one: Shelved) -> bool:
    return one.lease.state is LeaseState.READY and one.whole and not one.holders and one.claim is None


def _time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # of idle_minutes without end
        return "somebody deletes it"
