"""Many slices are watched by two lists a zone and interval, and no list is believed that lacks a slice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.slices.test_life import a_node, a_queued_resource
from tests.slices.test_provision import CLOCK, ZONE, make
from tpu.cloud import CloudError, ErrorKind, Node, NodeState, QueuedResource, QueuedResourceState
from tpu.cloud.google import GoogleTpuCloud
from tpu.emulator.emulator import Emulator
from tpu.slices.condition import Condition, LifeView
from tpu.slices.monitor import SINGLE_LOOKS, Monitor, Watch

QUICK_S = 0.1


class Counted:
    """The cloud behind it, with its calls counted; `hide` leaves names out of its lists."""

    def __init__(self, cloud: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.hide: set[str] = set()
        self._cloud = cloud

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls[method] += 1
            found = await getattr(self._cloud, method)(*arguments, **named)
            return [one for one in found if one.name not in self.hide] if method[:5] == "list_" else found

        return call


class Listed:
    """A zone as large as one likes: what its lists and gets say is set by hand."""

    def __init__(self, count: int = 0) -> None:
        self.queued = {f"s{i}": a_queued_resource(QueuedResourceState.ACTIVE) for i in range(count)}
        self.nodes = {f"s{i}": a_node(NodeState.READY) for i in range(count)}
        for name in self.nodes:
            object.__setattr__(self.queued[name], "name", name)
            object.__setattr__(self.nodes[name], "name", name)

    async def list_queued_resources(self, zone: str) -> list[QueuedResource]:
        return list(self.queued.values())

    async def list_nodes(self, zone: str) -> list[Node]:
        return list(self.nodes.values())

    async def get_queued_resource(self, zone: str, name: str) -> QueuedResource:
        return self._one(self.queued, name)

    async def get_node(self, zone: str, name: str) -> Node:
        return self._one(self.nodes, name)

    def _one(self, known: dict[str, Any], name: str) -> Any:
        if name not in known:
            raise CloudError(ErrorKind.NOT_FOUND, 5, name)
        return known[name]


@asynccontextmanager
async def monitoring(cloud: Any, every_s: float = QUICK_S, lists: bool = True) -> AsyncIterator[Monitor]:
    """A monitor; unless it is to take lists, a slice that is watched alone is asked for by name."""
    monitor = Monitor(cloud, CLOCK, every_s)
    if lists:
        monitor.keep_listing(ZONE)
    try:
        yield monitor
    finally:
        await monitor.close()


async def until(watch: Watch, wanted: Callable[[LifeView], bool]) -> LifeView:
    async with asyncio.timeout(20):
        seen = watch.view
        while not wanted(seen):
            seen = await watch.changed(seen)
        return seen


async def lists(counted: Counted, more: int) -> None:
    """Wait until so many more lists were taken."""
    async with asyncio.timeout(20):
        goal = counted.calls["list_nodes"] + more
        while counted.calls["list_nodes"] < goal:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_two_lists_an_interval_tell_of_all_slices_of_a_zone(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    counted, told = Counted(cloud), []
    names = ["s1", "s2", "s3"]
    for name in names:
        await make(cloud, name)
    async with monitoring(counted) as monitor:
        watches = [
            monitor.watch(ZONE, name, spot=True, on_change=lambda w: told.append(w.name)) for name in names
        ]
        for watch in watches:
            assert (await until(watch, lambda seen: seen.usable)).condition is Condition.READY_HEALTHY
        await lists(counted, 3)
        assert sorted(told) == names  # once each: what stays as it is, is not told again
        emulator.preempt("s2")
        seen = await until(watches[1], lambda seen: seen.lost)
        assert (seen.preempted, seen.gone) == (True, False)
        assert watches[0].view.usable
        assert counted.calls["get_node"] == counted.calls["get_queued_resource"] == 0
        assert counted.calls["list_nodes"] == counted.calls["list_queued_resources"] > 3


async def test_V8_a_list_that_lacks_a_slice_is_not_believed(cloud: GoogleTpuCloud) -> None:
    counted = Counted(cloud)
    await make(cloud, "s1")
    async with monitoring(counted) as monitor:
        watch = monitor.watch(ZONE, "s1", spot=True)
        await until(watch, lambda seen: seen.usable)
        counted.hide.add("s1")
        await lists(counted, 3)
        assert watch.view.usable
        assert counted.calls["get_node"] >= 2  # it was asked for by itself instead


async def test_V12_a_slice_that_is_deleted_by_hand_is_gone_once_a_get_says_so(cloud: GoogleTpuCloud) -> None:
    counted = Counted(cloud)
    await make(cloud, "s1")
    async with monitoring(counted) as monitor:
        watch = monitor.watch(ZONE, "s1", spot=True)
        await until(watch, lambda seen: seen.usable)
        await cloud.delete_queued_resource(ZONE, "s1")
        seen = await until(watch, lambda seen: seen.gone)
        assert seen.lost
        asked = counted.calls["get_node"]
        await lists(counted, 3)
        assert counted.calls["get_node"] == asked  # what is confirmed is not asked for again


async def test_a_zone_that_does_not_answer_loses_nothing(cloud: GoogleTpuCloud, emulator: Emulator) -> None:
    await make(cloud, "s1")
    async with monitoring(cloud) as monitor:
        watch = monitor.watch(ZONE, "s1", spot=True)
        await until(watch, lambda seen: seen.usable)
        emulator.fail_next("ListNodes", "PERMISSION_DENIED", "not now", times=3)
        seen = await until(watch, lambda seen: not seen.usable)
        assert seen.condition is Condition.UNKNOWN
        assert "not now" in seen.reason
        await until(watch, lambda seen: seen.usable)


async def test_a_slice_in_doubt_is_looked_at_before_the_next_list_is_due(
    cloud: GoogleTpuCloud, emulator: Emulator
) -> None:
    counted = Counted(cloud)
    await make(cloud, "s1")
    async with monitoring(counted, every_s=600) as monitor:
        watch = monitor.watch(ZONE, "s1", spot=True)
        await until(watch, lambda seen: seen.usable)
        emulator.preempt("s1")
        assert (await watch.look_now()).preempted
        assert counted.calls["list_nodes"] == 1


async def test_many_doubts_at_once_are_answered_by_one_list() -> None:
    counted = Counted(Listed(200))
    async with monitoring(counted, every_s=600) as monitor:
        watches = [monitor.watch(ZONE, f"s{i}", spot=True) for i in range(200)]
        await until(watches[-1], lambda seen: seen.usable)
        seen = await asyncio.gather(*(watch.look_now() for watch in watches))
        assert all(view.usable for view in seen)
        assert counted.calls["get_node"] <= SINGLE_LOOKS
        assert counted.calls["list_nodes"] == 2


async def test_an_answer_that_comes_late_does_not_undo_a_newer_one() -> None:
    listed = Listed(1)
    began, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Counted):
        slow = False

        async def list_nodes(self, zone: str) -> list[Node]:
            self.calls["list_nodes"] += 1
            found = await listed.list_nodes(zone)
            if self.slow:
                began.set()
                await go_on.wait()
            return found

    cloud = Slow(listed)
    async with monitoring(cloud) as monitor:
        watch = monitor.watch(ZONE, "s0", spot=True)
        await until(watch, lambda seen: seen.usable)
        cloud.slow = True
        await began.wait()  # this list still shows the node READY
        listed.nodes["s0"] = a_node(NodeState.PREEMPTED)
        object.__setattr__(listed.nodes["s0"], "name", "s0")
        assert (await watch.look_now()).lost
        views = []
        watch.on_change = lambda changed: views.append(changed.view)
        cloud.slow = False
        go_on.set()
        await lists(cloud, 2)
        assert views == []
        assert watch.view.lost


async def test_an_empty_list_does_not_lose_a_zone() -> None:
    listed = Listed(1000)
    counted = Counted(listed)
    async with monitoring(counted) as monitor:
        watches = [monitor.watch(ZONE, f"s{i}", spot=True) for i in range(1000)]
        await until(watches[-1], lambda seen: seen.usable)
        counted.hide = set(listed.nodes)
        await lists(counted, 2)
        counted.hide = set()
        await lists(counted, 2)
        assert all(watch.view.usable for watch in watches)
        assert counted.calls["get_node"] <= 200 * 3  # nor is it asked for slice by slice


async def test_a_zone_without_watches_is_not_asked() -> None:
    counted = Counted(Listed(3))
    async with monitoring(counted, lists=False) as monitor:
        watches = [monitor.watch(ZONE, f"s{i}", spot=True) for i in range(3)]
        await until(watches[0], lambda seen: seen.usable)
        watches[0].close()
        await lists(counted, 1)
        for watch in watches[1:]:
            watch.close()
        asked = sum(counted.calls.values())
        await asyncio.sleep(3 * QUICK_S)  # that nothing comes has no sign to wait for
        assert sum(counted.calls.values()) == asked


async def test_one_slice_alone_is_asked_for_by_name() -> None:
    listed = Listed(2)
    counted = Counted(listed)
    async with monitoring(counted, lists=False) as monitor:
        watch = monitor.watch(ZONE, "s0", spot=True)
        await until(watch, lambda seen: seen.usable)
        listed.nodes.pop("s0")
        assert (await until(watch, lambda seen: seen.lost)).reason == "the node is gone"
        assert counted.calls["list_nodes"] == 0
        assert counted.calls["get_node"] == counted.calls["get_queued_resource"] > 1


async def test_a_mistake_in_the_code_is_raised_to_who_waits() -> None:
    def broken(watch: Watch) -> None:
        raise ZeroDivisionError("a listener's own mistake")

    async with monitoring(Listed(1)) as monitor:
        watch = monitor.watch(ZONE, "s0", spot=True, on_change=broken)
        with pytest.raises(ZeroDivisionError):
            await until(watch, lambda seen: seen.lost)
        with pytest.raises(ZeroDivisionError):
            monitor.check()


async def test_a_look_at_ten_thousand_slices_is_cheap() -> None:
    counted = Counted(Listed(10_000))
    async with monitoring(counted, every_s=0.02) as monitor:
        watches = [monitor.watch(ZONE, f"s{i}", spot=True) for i in range(10_000)]
        await until(watches[-1], lambda seen: seen.usable)
        began, before = time.process_time(), counted.calls["list_nodes"]
        await lists(counted, 5)
        spent_s = (time.process_time() - began) / (counted.calls["list_nodes"] - before)
        assert spent_s < 0.3  # about 0.03 on an idle machine
        assert counted.calls["get_node"] == 0
