"""Whatever happens to a gang is known at once: over the SSH streams that are open anyway, and by the cloud's word."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.hosts.conftest import Slice, pair
from tpu.clock import SystemClock
from tpu.cloud.google import open_cloud
from tpu.hosts.address import HostAddress
from tpu.hosts.gang import SILENCE_S, GangSpec, end_gang, follow_gang, start_gang
from tpu.runs import watch as watching_module
from tpu.runs.watch import RECONNECT_S, SETTLE_S, GangView, GangWatch
from tpu.slices.condition import Condition
from tpu.slices.monitor import watching

__all__ = ["pair"]

FOREVER = "while :; do sleep 0.05; done"
# What a machine that is busy with other tests may add to any of the times below.
SLACK_S = 2.0


class Deaf:
    """Listens to nothing."""

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None: ...

    def on_end(self) -> None: ...


class Watched:
    """A gang that is followed; `ended` gives how it ended and after how many seconds."""

    def __init__(self, watch: GangWatch) -> None:
        self.view = watch.view
        self._task = asyncio.create_task(watch.until_ended())

    async def ended(self, since: float, within_s: float = 40.0) -> tuple[GangView, float]:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self._task), time.monotonic() - since

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def going_on(self) -> bool:
        return not self._task.done()


@contextlib.asynccontextmanager
async def followed(
    slice: Slice, spec: GangSpec, progress_s: float = 60.0, **options: Any
) -> AsyncIterator[Watched]:
    """A gang on both hosts with a watch that has heard of each."""
    async with slice.connect() as group:
        await start_gang(group, spec)
    async with open_cloud(slice.connection) as cloud, watching(cloud, SystemClock()) as monitor:
        word = monitor.watch("us-central2-b", slice.name, spot=True, was_ready=True)
        watch = GangWatch(
            slice.hosts,
            spec,
            slice.connection,
            slice.identity,
            word,
            SystemClock(),
            Deaf(),
            progress_s,
            **options,
        )
        watched = Watched(watch)
        try:
            async with asyncio.timeout(20):
                while not all(host.log_offset for host in watched.view.hosts):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            yield watched
        finally:
            await watched.close()
            with contextlib.suppress(Exception):  # its hosts may be gone, by the test's own doing
                async with slice.connect(0.0) as group:
                    await end_gang(group, spec, 0.0)


async def test_P3_a_killed_host_is_lost_two_seconds_after_its_connection_dropped(pair: Slice) -> None:
    async with followed(pair, pair.gang(f"echo up; {FOREVER}")) as gang:
        begun = time.monotonic()
        await asyncio.to_thread(pair.emulator.kill_host, pair.name, 1)
        view, took_s = await gang.ended(begun)
        assert view.hosts[1].lost is not None
        assert view.hosts[0].lost is None
        assert took_s < RECONNECT_S + SETTLE_S + SLACK_S
        assert view.cloud is not None
        assert view.cloud.usable  # the cloud does not know of it, and need not


async def test_a_connection_that_comes_back_is_no_loss(pair: Slice) -> None:
    async with followed(pair, pair.gang(f"echo up; {FOREVER}")) as gang:
        await asyncio.to_thread(pair.emulator.kill_ssh, pair.name, 0)
        await asyncio.sleep(RECONNECT_S + 1.0)  # a host that did not answer would be lost by now
        assert gang.going_on
        assert not gang.view.in_trouble


async def test_G8_a_host_that_hangs_is_lost_after_15_s_of_silence(
    pair: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SILENCE_S == 15.0  # shorter below, since a test should be
    monkeypatch.setattr(watching_module, "follow_gang", functools.partial(follow_gang, silence_s=3.0))
    async with followed(pair, pair.gang(f"echo up; {FOREVER}")) as gang:
        begun = time.monotonic()
        await asyncio.to_thread(pair.emulator.hang_host, pair.name, 0)
        try:
            view, took_s = await gang.ended(begun)
            assert view.hosts[0].lost is not None
            assert took_s < 3.0 + RECONNECT_S + SETTLE_S + SLACK_S
        finally:
            await asyncio.to_thread(pair.emulator.resume_host, pair.name, 0)


async def test_P1_a_preemption_is_known_sooner_than_the_next_look_is_due(pair: Slice) -> None:
    async with followed(pair, pair.gang(f"echo up; {FOREVER}")) as gang:
        begun = time.monotonic()
        await asyncio.to_thread(pair.emulator.preempt, pair.name)
        view, took_s = await gang.ended(begun)
        assert view.cloud is not None
        assert view.cloud.preempted
        assert took_s < RECONNECT_S + SLACK_S


async def test_P1_a_cloud_that_is_slow_to_say_so_is_asked_again_when_all_hosts_are_lost(pair: Slice) -> None:
    async with followed(pair, pair.gang(f"echo up; {FOREVER}")) as gang:
        begun = time.monotonic()
        for index in (0, 1):
            await asyncio.to_thread(pair.emulator.kill_host, pair.name, index)
        await asyncio.sleep(
            RECONNECT_S + SETTLE_S + 3.0
        )  # both are lost by now, and their verdict is waited for
        assert gang.going_on  # the cloud still shows the node as READY
        await asyncio.to_thread(pair.emulator.set_node_state, pair.name, "TERMINATED")
        view, _ = await gang.ended(begun)
        assert view.cloud is not None
        assert (view.cloud.condition, view.cloud.preempted) == (Condition.LOST, True)


async def test_P5_a_failure_ends_the_wait_at_once(pair: Slice) -> None:
    spec = pair.gang(f'echo up; [ "$W" = 0 ] && {FOREVER}; sleep 1; echo last words; exit 3')
    async with followed(pair, spec) as gang:
        view, took_s = await gang.ended(time.monotonic())
        assert (view.hosts[1].exit_code, list(view.hosts[1].tail)) == (3, ["up", "last words"])
        assert took_s < 1.0 + SETTLE_S + SLACK_S


async def test_P11_the_end_of_a_slices_life_ends_the_wait_ahead_of_it(pair: Slice) -> None:
    end = (time.time() + 3.0, "a preemptible slice lives for 24 h")
    async with followed(pair, pair.gang(f"echo up; {FOREVER}"), save_at=end) as gang:
        begun = time.monotonic()
        view, took_s = await gang.ended(begun)
        assert view.life_over == "a preemptible slice lives for 24 h"
        assert not any(host.failed for host in view.hosts)
        assert took_s < 3.0 + SETTLE_S + SLACK_S


async def test_a_gang_with_its_last_commit_is_told_to_leave_by_nobody(pair: Slice) -> None:
    # `committed` is -1 before the first commit: to this watch the gang has all that it is to have.
    end = (time.time(), "a preemptible slice lives for 24 h")
    spec = pair.gang(f"echo up; {FOREVER}")
    async with followed(pair, spec, save_at=end, why_leave=lambda _: "evicted", last_step=-1) as gang:
        await asyncio.sleep(2.5)  # both reasons to leave have been there for all this time
        assert gang.going_on
        assert not gang.view.told_to_leave


async def test_a_command_that_prints_is_not_hung_and_one_that_is_silent_is(pair: Slice) -> None:
    talks = pair.gang("while [ ! -e quiet ]; do echo up; sleep 0.3; done; rm quiet; sleep 600")
    async with followed(pair, talks, progress_s=2.0, output_counts=True) as gang:
        await asyncio.sleep(4.0)  # twice as long as it may be silent
        assert gang.going_on
        async with pair.connect() as group:
            await group.run("touch quiet", timeout_s=10.0)
        view, _ = await gang.ended(time.monotonic())
        assert view.hung_s is not None
