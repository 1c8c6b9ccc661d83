"""Whether a run may use its candidates at all, looked at once before anything is made; and what its traffic costs."""

from __future__ import annotations

import asyncio

from tpu.checkpoint import objects
from tpu.checkpoint.fence import Commit, load_fence
from tpu.checkpoint.restore import Damaged, read_manifest
from tpu.runs.context import RunContext
from tpu.slices.candidate import Candidate
from tpu.slices.preflight import Traffic, preflight
from tpu.slices.regions import BucketHome, Crossing, bucket_home, crossing


class Clearance:
    """Asks bucket and cloud once in the life of a driver."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._home: BucketHome | None = None
        self._home_known = False
        self._given = False

    async def check(self) -> None:
        """Refuse what cannot be, or costs what nobody has allowed.

        Raises:
            CloudError: one error for all that is wrong.
        """
        if self._given:
            return
        run, home = self._run, await self._where()
        if home is None:
            run.report(
                f"nobody may say where {run.connection.bucket} is (it takes the right storage.buckets.get), so it is "
                "not known whether traffic between regions will cost money"
            )
        wanted = run.record.config.slice
        size_gb = await asyncio.to_thread(newest_checkpoint_gb, run.run_dir)
        traffic = Traffic(size_gb, len(run.record.segments))
        await preflight(
            run.cloud, wanted.choices, run.request, run.connection, home, wanted.allow_regions, traffic
        )
        self._given = True

    async def crossing(self, candidate: Candidate) -> Crossing | None:
        """What each GB between the bucket and a slice costs; None if nothing, or if nobody may say where it is."""
        home = await self._where()
        return crossing(home, candidate.region) if home is not None else None

    async def _where(self) -> BucketHome | None:
        if not self._home_known:
            found = await asyncio.to_thread(objects.bucket_location, self._run.connection.bucket)
            self._home, self._home_known = bucket_home(*found) if found else None, True
        return self._home


def newest_checkpoint_gb(run_dir: str) -> float | None:
    """Size of a run's newest checkpoint; None if there is none, or it cannot be read."""
    newest = load_fence(run_dir).newest()
    return checkpoint_gb(run_dir, newest) if newest is not None else None


def checkpoint_gb(run_dir: str, commit: Commit) -> float | None:
    """Size of a checkpoint; None if its manifest cannot be read."""
    try:
        return sum(file.size for file in read_manifest(run_dir, commit).files) / 1e9
    except Damaged:
        return None
