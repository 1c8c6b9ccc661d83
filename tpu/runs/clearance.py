"""Whether a run may use its candidates at all, looked at once before anything is made; and what its traffic costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tpu.checkpoint import objects
from tpu.checkpoint.fence import Commit, load_fence
from tpu.checkpoint.restore import Damaged, read_manifest
from tpu.cloud import TpuCloud
from tpu.connection import Connection
from tpu.runs.record import RunRecord
from tpu.slices.candidate import Candidate
from tpu.slices.preflight import Traffic, preflight
from tpu.slices.regions import BucketHome, Crossing, bucket_home, crossing
from tpu.slices.request import SliceRequest


class Clearance:
    """Asks bucket and cloud once in the life of a driver."""

    def __init__(
        self,
        record: RunRecord,
        run_dir: str,
        cloud: TpuCloud,
        connection: Connection,
        report: Callable[[str], None],
    ) -> None:
        self._record = record
        self._run_dir = run_dir
        self._cloud = cloud
        self._connection = connection
        self._report = report
        self._home: BucketHome | None = None
        self._home_known = False
        self._given = False

    async def check(self, request: SliceRequest) -> None:
        """Refuse what cannot be, or costs what nobody has allowed. `request` is what all candidates have in common.

        Raises:
            CloudError: one error for all that is wrong.
        """
        if self._given:
            return
        config, home = self._record.config, await self._where()
        if home is None:
            self._report(
                f"nobody may say where {self._connection.bucket} is (it takes the right storage.buckets.get), so it is "
                "not known whether traffic between regions will cost money"
            )
        size_gb = await asyncio.to_thread(newest_checkpoint_gb, self._run_dir)
        traffic = Traffic(size_gb, len(self._record.segments))
        await preflight(
            self._cloud, config.slice.choices, request, self._connection, home, config.slice.allow_regions, traffic
        )  # fmt: skip
        self._given = True

    async def crossing(self, candidate: Candidate) -> Crossing | None:
        """What each GB between the bucket and a slice costs; None if nothing, or if nobody may say where it is."""
        home = await self._where()
        return crossing(home, candidate.region) if home is not None else None

    async def _where(self) -> BucketHome | None:
        if not self._home_known:
            found = await asyncio.to_thread(objects.bucket_location, self._connection.bucket)
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
