"""The beat that keeps the leases of all runs of one process: a slice is read and written once, however many have it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tpu.clock import Clock
from tpu.slices import lease as leases
from tpu.slices.lease import LEASE_BEAT_S, Claim, Holder, Lease, LeaseRefused
from tpu.slices.lease_book import LeaseBook, update

# So many slices at once: one after the other those of a large sweep would take longer than a beat may.
AT_ONCE = 16


class Member(Protocol):
    """A run that holds leases; see tpu.runs.membership.Membership."""

    @property
    def place(self) -> tuple[str, str]: ...

    @property
    def held(self) -> Mapping[str, object]: ...

    def silent(self, lease: Lease) -> tuple[Holder | Claim, ...]: ...

    def renewed(self, lease: Lease, now: float) -> Lease: ...

    async def hear(self, name: str, said: Lease | LeaseRefused) -> None: ...

    def missed(self, name: str, error: Exception) -> None: ...


async def renew_together(book: LeaseBook, name: str, members: Sequence[Member], clock: Clock) -> None:
    """Renew one slice for all members of its pool that hold chips of it, and let each hear what came of it."""
    now, ours = clock.time(), {member.place[1] for member in members}
    refused: dict[int, LeaseRefused] = {}

    def change(lease: Lease) -> Lease:
        refused.clear()
        # All look at what was read, before it is changed.
        seen = {(one.uid, one): one for member in members for one in member.silent(lease)}
        for silent in seen.values():
            if silent.uid not in ours:  # nobody waits for a run that has died, nor leaves for it
                lease = leases.drop(lease, silent, now)
        for number, member in enumerate(members):
            try:
                lease = member.renewed(lease, now)
            except LeaseRefused as error:
                refused[number] = error
        return lease

    after: Lease | LeaseRefused
    try:
        after = (await update(book, members[0].place[0], name, change)).lease
    except LeaseRefused as error:  # there is no lease of it
        refused.clear()
        after = error
    for number, member in enumerate(members):
        await member.hear(name, refused.get(number, after))


class LeaseBeat:
    """Beats while it has members."""

    def __init__(self, book: LeaseBook, clock: Clock) -> None:
        self._book = book
        self._clock = clock
        self._members: list[Member] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, member: Member) -> None:
        self._members.append(member)
        if self._task is None:
            self._task = asyncio.create_task(self._beat())

    async def leave(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)
        if self._members or self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # what it had to say was said
            await task

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(LEASE_BEAT_S)
            places: dict[tuple[str, str], list[Member]] = defaultdict(list)
            for member in self._members:
                for name in member.held:
                    places[member.place[0], name].append(member)
            room = asyncio.Semaphore(AT_ONCE)
            await asyncio.gather(*(self._renew(name, members, room) for (_, name), members in places.items()))

    async def _renew(self, name: str, members: Collection[Member], room: asyncio.Semaphore) -> None:
        async with room:
            # Those that have given it back, or left, while others were renewed.
            left = [member for member in members if member in self._members and name in member.held]
            if not left:
                return
            try:
                await renew_together(self._book, name, left, self._clock)
            except Exception as error:  # whatever it is: a beat that ends is taken for the runs' death
                for member in left:
                    member.missed(name, error)
