"""A slice that was kept for somebody who did not come is deleted, and one that is in use is not."""

from __future__ import annotations

from tests.runs.conftest import Track
from tpu.clock import SystemClock
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.runs.trimming import delete_idle
from tpu.slices.lease import LeaseState
from tpu.slices.lease_book import GcsLeaseBook


async def test_a_slice_that_nobody_takes_after_all_is_deleted_and_one_in_use_is_not(track: Track):
    book, clock, told = GcsLeaseBook(track.bucket), SystemClock(), list[str]()
    async with open_cloud(Connection.from_environment(track.emulator.env)) as cloud:
        async with track.driving(track.numpy_run("one")) as driver:
            name = (await driver.provision()).name
            await delete_idle("default", cloud, book, clock, told.append)
            (held,) = await book.list("default")
            assert held.lease.holder(driver.record.uid) is not None
            await driver.clean_up("done", keep=True)
        (kept,) = await book.list("default")
        assert (kept.lease.slice, kept.lease.state, kept.lease.holders) == (name, LeaseState.READY, ())
        await delete_idle("default", cloud, book, clock, told.append)
    (gone,) = await book.list("default", past=True)
    assert gone.lease.state is LeaseState.GONE
    assert len(told) == 1
    track.assert_nothing_left()
