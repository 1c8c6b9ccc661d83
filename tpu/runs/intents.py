"""What a run asks the cloud for stands in its history and in its pool before it is asked.

So whoever takes the run up finds its slices, and others of the pool see what is being made and how much is free of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from tpu.runs.context import RunContext
from tpu.runs.membership import Withdrawn
from tpu.slices.candidate import Candidate
from tpu.slices.names import slice_name


class RunIntents:
    """The IntentBook of a run. `on_preempted` gets name and reason of a slice that was taken while being made."""

    def __init__(self, run: RunContext, on_preempted: Callable[[str, str], Awaitable[None]]) -> None:
        self._run = run
        self._on_preempted = on_preempted
        self._naming = asyncio.Lock()
        self._given_up: set[str] = set()

    async def intended(self, candidate: Candidate) -> str:
        """Raises tpu.runs.membership.Withdrawn if it is not to be asked for after all."""
        async with self._naming:  # two that race must not count to the same number
            number = sum(event.kind == "slice-intended" for event in self._run.log.events) + 1
            name = slice_name(self._run.record.config.name, number, f"{self._run.record.created}")
            await self._run.log.note(
                "slice-intended",
                slice=name,
                chips=list(self._run.member.chips_of_new(candidate)),
                **asdict(candidate),
            )
        try:
            await self._run.member.intend(name, candidate)
        except Withdrawn as error:
            await self._run.log.note("slice-deleted", slice=name, why=f"never asked for: {error}")
            raise
        return name

    async def given_up(self, name: str, why: str) -> None:
        if name not in self._given_up:
            self._given_up.add(name)
            await self._run.log.note("provision-failed", slice=name, reason=why)

    async def ended(self, name: str, why: str, *, deleted: bool, preempted: bool) -> None:
        await self.given_up(name, why)
        if deleted:
            await self._run.member.gone(name, why)
            await self._run.log.note("slice-deleted", slice=name, why=why)
        else:
            await self._run.member.close(name, why)
        if preempted:
            await self._on_preempted(name, why)
