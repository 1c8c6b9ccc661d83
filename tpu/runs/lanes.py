"""The runs of a pack: each is a run of its own, whose attempts begin and end with those of the pack's gang.

The pack holds slice and gang and commits nothing; checkpoints, metrics, attempts and verdicts are its runs' own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu.checkpoint.fence import Fence, close_attempt, load_fence, open_attempt, update_fence
from tpu.runs.event_log import EventLog
from tpu.runs.goodput import waste_begins
from tpu.runs.record import RunRecord
from tpu.runs.tenure import Tenure
from tpu.runs.tracker import Tracker
from tpu.runs.watch import GangView
from tpu.slices.verdict import Verdict, VerdictKind
from tpu.train.packs import Member


@dataclass(frozen=True)
class Ending:
    """How a gang has ended: `at` is in seconds since 1970 on the clock of the flow's machine."""

    verdict: Verdict
    slice: str
    at: float
    evicted: bool = False
    slice_given_up: bool = False


@dataclass
class Lane:
    """One run that a pack trains, while this process may act for it.

    `attempt` is the one that is open, None if there is none. `said` is what its program has told of its end in it,
    `verdict` the one on its last attempt.
    """

    record: RunRecord
    run_dir: str
    log: EventLog
    tenure: Tenure
    tracker: Tracker
    attempt: int | None = None
    said: Mapping[str, Any] | None = None
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.record.config.name

    def recall(self, fence: Fence) -> None:
        """What an earlier driver has left open."""
        started = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-started"}
        ended = {e.detail["attempt"] for e in self.log.events if e.kind == "attempt-ended"}
        if fence.open and fence.attempt in started - ended:
            self.attempt = fence.attempt


def lane_verdict(said: Mapping[str, Any] | None, gang: Verdict) -> Verdict:
    """Why an attempt of a run in a pack ended, by what its program said of it and the verdict on the gang. Pure."""
    end, reason = (said["end"], said["reason"]) if said is not None else ("left", "")
    match end:
        case "finished":
            return Verdict(VerdictKind.FINISHED, "the last step is committed")
        case "diverged":
            return Verdict(VerdictKind.USER_FAILURE, reason, final=True)
        case "failed":
            return Verdict(VerdictKind.USER_FAILURE, reason)
        case "fenced out":
            return Verdict(VerdictKind.INFRASTRUCTURE, "another attempt of the run may write now")
        case _ if gang.kind is VerdictKind.FINISHED:
            return Verdict(VerdictKind.INFRASTRUCTURE, "its pack has ended without it")
        case _:
            return gang


class Lanes:
    """All runs of a pack by lane (`members`), and those that take part (`live`, by name)."""

    def __init__(self, pack: str, members: Sequence[Member]) -> None:
        self.pack = pack
        self.members = members
        self.live: dict[str, Lane] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    async def open(self, slice_name: str) -> list[Member]:
        """Open the next attempt of each run that takes part; what the pack's program is told."""
        opened = await asyncio.gather(*(self._open(lane, slice_name) for lane in self.live.values()))
        attempts = dict(zip(self.live, opened, strict=True))
        return [replace(member, attempt=attempts.get(member.name)) for member in self.members]

    async def _open(self, lane: Lane, slice_name: str) -> int:
        number = (await asyncio.to_thread(load_fence, lane.run_dir)).attempt + 1
        fence = await asyncio.to_thread(update_fence, lane.run_dir, lambda one: open_attempt(one, number))
        newest = fence.newest()
        await lane.log.note(
            "attempt-started", attempt=number, slice=slice_name, resume=newest.step if newest else None,
            code=lane.record.code["sha256"], pack=self.pack, lane=self.names.index(lane.name),
        )  # fmt: skip
        lane.attempt, lane.said, lane.verdict = number, None, None
        return number

    async def close(self, ending: Ending, view: GangView | None) -> None:
        """The gang has ended, and every attempt with it that had not before; `view` is what was seen of it."""
        open_lanes = [lane for lane in self.live.values() if lane.attempt is not None]
        await asyncio.gather(*(self.end(lane, ending, view) for lane in open_lanes))

    async def end(self, lane: Lane, ending: Ending, view: GangView | None) -> None:
        """Close the attempt of one run: its lane stays empty as long as the gang lives."""
        attempt, seen = lane.attempt, view.members.get(lane.name) if view is not None else None
        assert attempt is not None
        verdict = lane_verdict(lane.said, ending.verdict)
        fence = await asyncio.to_thread(update_fence, lane.run_dir, close_attempt)
        last = fence.closed.get(attempt)
        committed = last.step if last else resumed_at(fence, attempt)
        seen = seen or GangView([])
        await lane.log.note(
            "attempt-ended", attempt=attempt, slice=ending.slice, verdict=verdict.kind.value,
            reason=verdict.reason, evidence=list(verdict.evidence), last_commit=last.step if last else None,
            phases=seen.phases, ended=ending.at, resume=seen.resumed or 0,
            reached=seen.step if view is not None else None, steps=lane.record.config.steps,
            waste_from=waste_begins(seen.steps, committed), commits=seen.commits, evicted=ending.evicted,
            slice_given_up=ending.slice_given_up,
        )  # fmt: skip
        lane.attempt, lane.verdict = None, verdict


def resumed_at(fence: Fence, attempt: int) -> int:
    """Step of the newest commit that an attempt could start from."""
    return max((c.step for c in fence.commits if c.attempt < attempt), default=0)
