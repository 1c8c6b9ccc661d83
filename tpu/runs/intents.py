"""What a run asks the cloud for stands in its history and in its pool before it is asked.

So whoever takes the run up finds its slices, and others of the pool see what is being made and how much is free of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from tpu.runs.event_log import EventLog
from tpu.runs.membership import Membership, Withdrawn
from tpu.runs.record import RunRecord
from tpu.slices.candidate import Candidate
from tpu.slices.names import slice_name


class RunIntents:
    """The IntentBook of a run. `on_preempted` gets name and reason of a slice that was taken while being made."""

    def __init__(
        self,
        record: RunRecord,
        log: EventLog,
        member: Membership,
        on_preempted: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._record = record
        self._log = log
        self._member = member
        self._on_preempted = on_preempted
        self._naming = asyncio.Lock()

    async def intended(self, candidate: Candidate) -> str:
        """Raises tpu.runs.membership.Withdrawn if it is not to be asked for after all."""
        async with self._naming:  # two that race must not count to the same number
            number = sum(event.kind == "slice-intended" for event in self._log.events) + 1
            name = slice_name(self._record.config.name, number, f"{self._record.created}")
            await self._log.note(
                "slice-intended",
                slice=name,
                chips=list(self._member.chips_of_new(candidate)),
                **asdict(candidate),
            )
        try:
            await self._member.intend(name, candidate)
        except Withdrawn as error:
            await self._log.note("slice-deleted", slice=name, why=f"never asked for: {error}")
            raise
        return name

    async def ended(self, name: str, why: str, *, deleted: bool, preempted: bool) -> None:
        await self._log.note("provision-failed", slice=name, reason=why)
        if deleted:
            await self._member.gone(name, why)
            await self._log.note("slice-deleted", slice=name, why=why)
        else:
            await self._member.close(name, why)
        if preempted:
            await self._on_preempted(name, why)
