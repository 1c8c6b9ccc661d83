"""What the traffic of an attempt between slice and bucket has cost, where they are not in one region."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tpu.runs.clearance import Clearance, newest_checkpoint_gb
from tpu.runs.context import RunContext
from tpu.runs.event_log import candidate_of
from tpu.topology import accelerator_type

# US dollars: a run whose bucket is as near as can be has nothing to decide by less.
_WORTH_TELLING = 0.01


def moved(
    segments: Sequence[int], resume: int | None, last_commit: int | None, hosts: int
) -> tuple[int, int]:
    """How many checkpoints an attempt has read and written: every host reads all of the one it begins with.

    `resume` and `last_commit` are steps, None for none. Checkpoints that were written between two stop steps, after a
    preemption notice, are known by the last one only.
    """
    begin = resume or 0
    written = 0
    if last_commit is not None and last_commit > begin:
        written = sum(begin < stop <= last_commit for stop in segments) + (last_commit not in segments)
    return (hosts if resume is not None else 0), written


async def note_egress(run: RunContext, clearance: Clearance, attempt: int) -> None:
    """Put the cost of an attempt that has ended into the run's history, if it is one."""
    log = run.log
    started = next(e for e in log.events if e.kind == "attempt-started" and e.detail["attempt"] == attempt)
    ended = next(e for e in log.events if e.kind == "attempt-ended" and e.detail["attempt"] == attempt)
    candidate = candidate_of(log.events, started.detail["slice"])
    costs = await clearance.crossing(candidate)
    if costs is None:
        return
    hosts = accelerator_type(candidate.accelerator_type).hosts
    read, written = moved(run.record.segments, started.detail["resume"], ended.detail["last_commit"], hosts)
    size_gb = await asyncio.to_thread(newest_checkpoint_gb, run.run_dir)
    if size_gb is None or not read + written:
        return
    dollars = costs.dollars(read * size_gb, written * size_gb)
    if not costs.abroad and dollars < _WORTH_TELLING:
        return
    await log.note(
        "egress", what=f"checkpoints between the bucket and {candidate.region}", attempt=attempt,
        slice=started.detail["slice"], dollars=dollars,
        egress_gb=(read + written) * size_gb, read_a_gb=costs.read, write_a_gb=costs.write,
    )  # fmt: skip
