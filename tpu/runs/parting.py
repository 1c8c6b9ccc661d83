"""How a run parts with a slice: it is given back to the pool, left to those who use it too, or deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpu.cloud import PREEMPTIBLE, TpuCloud
from tpu.runs.context import RunContext
from tpu.runs.event_log import RunEvent, candidate_of, early_death
from tpu.slices.condition import LifeView, slice_condition
from tpu.slices.deletion import delete_slice
from tpu.slices.names import hosts_in_short
from tpu.slices.project_memory import remembered

DELETE_S = 1800.0


class Parting:
    """`on_parted` gets the name of each slice that is none of the run's any more."""

    def __init__(self, run: RunContext, on_parted: Callable[[str], None]) -> None:
        self._run = run
        self._on_parted = on_parted

    async def part_with(self, name: str, why: str, seen: LifeView, keep: bool = False) -> None:
        """Give a slice back on which nothing of the run lives, if the pool can use it; else delete it.

        `seen` is what the cloud says of it. That it says nothing now is no reason to take it from others: who takes
        it asks again. `keep` says that somebody takes it next.
        """
        await self._run.tenure.check()
        if not seen.lost and await self._run.member.part_with(name, clean=True, why=why, keep=keep):
            await self._released(name, why)
        else:
            await self.delete(name, why)

    async def delete(self, name: str, why: str) -> None:
        """Delete a slice; returns once the cloud says that it is gone.

        One that others use is left to them, if the cloud has not taken it; one whose lease was lost is left alone.
        """
        await self._run.tenure.check()
        if (lost := self._run.member.lost.get(name)) is not None:
            await self._released(name, lost)
            return
        candidate = candidate_of(self._run.log.events, name)
        if (await left_behind(self._run.cloud, self._run.log.events, name)).lost:
            await self._run.member.close(name, why)
        elif await self._run.member.part_with(name, clean=False, why=why):
            await self._released(name, why)
            return
        self._run.report(f"deleting slice {name}: {hosts_in_short(why, name)}")
        await delete_slice(self._run.cloud, candidate.zone, name, self._run.clock, DELETE_S)
        await self._run.member.gone(name, why)
        self._on_parted(name)
        await self._run.log.note("slice-deleted", slice=name, why=why)
        if (asked := early_death(self._run.log.events, name)) is not None:
            await remembered(self._run.memory.note(candidate, "early death", asked), None, self._run.report)

    async def _released(self, name: str, why: str) -> None:
        self._run.report(f"slice {name} is given back to the pool: {hosts_in_short(why, name)}")
        self._on_parted(name)
        await self._run.log.note("slice-released", slice=name, why=why)


async def left_behind(cloud: TpuCloud, events: Sequence[RunEvent], name: str) -> LifeView:
    """What the cloud says of a slice that a run has had or asked for: it may still be on its way."""
    candidate = candidate_of(events, name)
    spot = candidate.provisioning in PREEMPTIBLE
    return await slice_condition(cloud, candidate.zone, name, spot=spot, was_ready=was_ready(events, name))


def was_ready(events: Sequence[RunEvent], name: str) -> bool:
    """Whether a slice has been ready for the run."""
    kinds = ("slice-ready", "slice-leased")
    return any(event.kind in kinds and event.detail["slice"] == name for event in events)
