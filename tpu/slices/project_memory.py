"""What all runs of a project remember together: how zones have served, and how many slices were created lately."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import Clock
from tpu.slices import creation_rate, zone_health
from tpu.slices.candidate import Candidate
from tpu.slices.creation_rate import RateLimit, Tokens
from tpu.slices.shared import BucketShared, MalformedShared, MemoryShared, Shared, SharedContended
from tpu.slices.zone_health import Closed, Kind, Paused, Permission, ZoneHealth

Result = TypeVar("Result")

_HEALTH, _RATE = "pools/zone-health.json", "pools/creation-rate.json"


class ProjectMemory:
    """Asked before each creation, and told what became of it."""

    def __init__(
        self,
        health: Shared[ZoneHealth],
        rate: Shared[Tokens | None],
        clock: Clock,
        limit: RateLimit | None = None,
    ) -> None:
        self._health = health
        self._rate = rate
        self._clock = clock
        self._limit = limit or RateLimit()

    async def let_through(self, candidate: Candidate) -> Permission:
        """Whether the candidate's place may be asked now; a bad place lets one through at a time."""
        found = (await self._health.read()).of(candidate)
        if not found.outcomes:
            return zone_health.permission(found, self._clock.time())

        def step(health: ZoneHealth) -> tuple[ZoneHealth, Permission]:
            known, answer = zone_health.let_through(health.of(candidate), self._clock.time())
            return health.having(candidate, known), answer

        return await self._health.change(step)

    async def serving(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """Those whose places may be asked now, be it more slowly; nothing is asked for by this."""
        health, now = await self._health.read(), self._clock.time()
        permissions = ((one, zone_health.permission(health.of(one), now)) for one in candidates)
        return tuple(one for one, permission in permissions if not isinstance(permission, Closed | Paused))

    async def note(self, candidate: Candidate, kind: Kind, asked: float) -> None:
        """Remember what became of a slice; `asked` is when it was asked for, in seconds since the epoch."""
        now = self._clock.time()

        def step(health: ZoneHealth) -> tuple[ZoneHealth, None]:
            return health.having(candidate, zone_health.noted(health.of(candidate), kind, asked, now)), None

        await self._health.change(step)

    async def note_no_quota(self, candidate: Candidate, quota: str) -> None:
        """Remember that the project has none of the quota that the place needs: it is not asked again."""

        def step(health: ZoneHealth) -> tuple[ZoneHealth, None]:
            return health.having(candidate, zone_health.closed(health.of(candidate), quota)), None

        await self._health.change(step)

    async def forget(self, zone: str) -> None:
        """Know nothing of a zone any more: for a person who has got quota there."""
        await self._health.change(lambda health: (health.opened(zone), None))

    async def health(self) -> ZoneHealth:
        return await self._health.read()

    async def reserve_creation(self) -> float:
        """Take a token, and return the seconds to wait before the creation may be sent."""
        return await self._rate.change(
            lambda tokens: creation_rate.reserved(tokens, self._limit, self._clock.time())
        )

    async def creation_refused(self) -> None:
        """The API has refused a creation as one too many."""
        await self._rate.change(lambda tokens: (creation_rate.emptied(tokens, self._clock.time()), None))


async def remembered(asked: Awaitable[Result], otherwise: Result, report: Callable[[str], None]) -> Result:
    """What the project remembers, or `otherwise` if it cannot be asked: it is a help, not a condition."""
    try:
        return await asked
    except (StorageUnavailable, SharedContended, MalformedShared) as error:
        report(f"going on without what the project remembers of its zones: {error}")
        return otherwise


def memory_of_bucket(bucket: str, clock: Clock, chance: random.Random | None = None) -> ProjectMemory:
    """The project's memory as all its processes see it; `bucket` is a gs:// URL."""
    return ProjectMemory(
        BucketShared(
            f"{bucket}/{_HEALTH}", zone_health.to_json, zone_health.from_json, ZoneHealth(), clock, chance
        ),
        BucketShared(
            f"{bucket}/{_RATE}", creation_rate.to_json, creation_rate.from_json, None, clock, chance
        ),
        clock,
    )


def memory_of_process(clock: Clock, limit: RateLimit | None = None) -> ProjectMemory:
    """A memory that only this process has, for simulations."""
    return ProjectMemory(MemoryShared(ZoneHealth()), MemoryShared(None), clock, limit)
