"""What the cloud says of many slices, by one list of nodes and one of queued resources a zone and interval.

The number of calls does not grow with the number of slices; a single one is asked for by name. Two answers are never
believed: a list that lacks a slice is confirmed by asking for that slice alone before it counts as gone, since a list
may lag behind or leave out a part of a zone; and a zone that does not answer makes its slices UNKNOWN, not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from tpu.clock import Clock, sleep_unless
from tpu.cloud import CloudError, Node, QueuedResource, TpuCloud
from tpu.slices.condition import Condition, LifeView, absent, look_of, take_look, view

# Between two lists of a zone, and the least time between two when somebody wants to know at once.
EVERY_S, HURRIED_S = 5.0, 1.0
# Slices that are asked for alone at one time; beyond that one list answers all who want to know.
SINGLE_LOOKS = 4
# So many absences are confirmed after one list; the others wait for the next. Were a list to come back empty,
# a whole zone would be asked for slice by slice else.
CONFIRMED_A_LIST = 200

_NOT_LOOKED = LifeView(Condition.UNKNOWN, "nobody has looked yet")


@dataclass(frozen=True)
class ZoneLook:
    """What a zone's lists said, by name; `began` is monotonic, in seconds."""

    began: float
    queued_resources: Mapping[str, QueuedResource]
    nodes: Mapping[str, Node]


class Watch:
    """One watched slice. `view` is the cloud's newest word, UNKNOWN before the first look.

    `was_ready` becomes True with the first look that finds the slice ready: see tpu.slices.condition.Look.
    """

    __slots__ = ("_heard", "_serial", "_waiters", "_zone", "name", "on_change", "spot", "view", "was_ready")

    def __init__(
        self,
        zone: _Zone,
        name: str,
        spot: bool,
        was_ready: bool,
        on_change: Callable[[Watch], None] | None,
    ) -> None:
        self.name = name
        self.spot = spot
        self.was_ready = was_ready
        self.view = _NOT_LOOKED
        self.on_change = on_change
        self._zone = zone
        self._serial = -1
        self._heard: tuple[QueuedResource | None, Node | None] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def zone(self) -> str:
        return self._zone.name

    @property
    def answer(self) -> tuple[QueuedResource | None, Node | None] | None:
        """What `view` was read from; None if the cloud's newest word is an error, or none yet."""
        return self._heard

    async def changed(self, known: LifeView) -> LifeView:
        """The cloud's word as soon as it is another than `known`."""
        while self.view == known:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await self._zone.unless_broken(waiter)
            finally:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return self.view

    async def look_now(self) -> LifeView:
        """The cloud's word of a look that begins now, not at the next interval: a host has dropped, say."""
        return await self._zone.look_now(self)

    def close(self) -> None:
        """Watch no more. A zone in which nothing is watched is not asked."""
        self._zone.leave(self)

    def hear(self, serial: int, answer: tuple[QueuedResource | None, Node | None] | CloudError) -> None:
        """Take the answer of look number `serial` in, unless a look that began later has answered already."""
        if serial < self._serial:
            return
        self._serial = serial
        if isinstance(answer, CloudError):
            self._heard, seen = None, LifeView(Condition.UNKNOWN, str(answer))
        elif answer == self._heard:
            return
        else:
            self._heard, seen = answer, view(look_of(*answer, spot=self.spot, was_ready=self.was_ready))
        self.was_ready = self.was_ready or seen.usable
        if seen == self.view:
            return
        self.view = seen
        _wake(self._waiters)
        if self.on_change is not None:
            self.on_change(self)


class Monitor:
    """Watches slices of any number of zones; one for a process is enough, of one event loop."""

    def __init__(self, cloud: TpuCloud, clock: Clock, every_s: float = EVERY_S) -> None:
        self._cloud = cloud
        self._clock = clock
        self._every_s = every_s
        self._zones: dict[str, _Zone] = {}

    def watch(
        self,
        zone: str,
        name: str,
        *,
        spot: bool,
        was_ready: bool = False,
        on_change: Callable[[Watch], None] | None = None,
    ) -> Watch:
        """Watch a slice from now on; the first look comes with the zone's next list.

        `spot` counts only where the cloud does not know the slice. `on_change` is called with the watch each
        time that its view is another one. Begin to watch after the creation was answered: a look that began
        before it finds nothing, and would say that the slice is gone.
        """
        return self._zone(zone).join(name, spot, was_ready, on_change)

    def keep_listing(self, zone: str) -> None:
        """List this zone at each interval also while nothing in it is watched, until `close`."""
        self._zone(zone).keep()

    def _zone(self, zone: str) -> _Zone:
        if zone not in self._zones:
            self._zones[zone] = _Zone(zone, self._cloud, self._clock, self._every_s)
        return self._zones[zone]

    def newest(self, zone: str) -> ZoneLook | None:
        """What the zone's newest lists said of all slices, watched or not; None before the first answer."""
        return self._zones[zone].newest if zone in self._zones else None

    def check(self) -> None:
        """Raises what broke the watching of a zone, if something has: a mistake in the code, not the cloud's."""
        for zone in self._zones.values():
            zone.check()

    async def close(self) -> None:
        """Watch nothing any more."""
        for zone in self._zones.values():
            await zone.close()


@contextlib.asynccontextmanager
async def watching(cloud: TpuCloud, clock: Clock, every_s: float = EVERY_S) -> AsyncIterator[Monitor]:
    """A monitor for the time of the block."""
    monitor = Monitor(cloud, clock, every_s)
    try:
        yield monitor
    finally:
        await monitor.close()


class _Zone:
    """One zone: its lists, and who wants to hear of them."""

    def __init__(self, name: str, cloud: TpuCloud, clock: Clock, every_s: float) -> None:
        self.name = name
        self.newest: ZoneLook | None = None
        self._cloud = cloud
        self._clock = clock
        self._every_s = every_s
        self._watches: dict[str, list[Watch]] = {}
        self._kept = False
        self._task: asyncio.Task[None] | None = None
        self._serials = itertools.count()
        self._single = 0
        self._hurried: list[asyncio.Future[None]] = []
        self._hurry = asyncio.Event()

    def join(
        self, name: str, spot: bool, was_ready: bool, on_change: Callable[[Watch], None] | None
    ) -> Watch:
        watch = Watch(self, name, spot, was_ready, on_change)
        self._watches.setdefault(name, []).append(watch)
        self._start()
        return watch

    def keep(self) -> None:
        self._kept = True
        self._start()

    def leave(self, watch: Watch) -> None:
        others = self._watches.get(watch.name, [])
        if watch in others:
            others.remove(watch)
        if not others:
            self._watches.pop(watch.name, None)
        if not self._watches and not self._kept and self._task is not None:
            self._task.cancel()
            self._task = None
            self._release()

    def check(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self._release()

    async def unless_broken(self, waiter: asyncio.Future[None]) -> None:
        """Wait for `waiter`; raises what ends the zone's task, since nobody would set it then."""
        watched = {waiter} if self._task is None else {waiter, self._task}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def look_now(self, watch: Watch) -> LifeView:
        if self._single < SINGLE_LOOKS:
            self._single += 1
            try:
                await self._look_at(watch.name, [watch])
            finally:
                self._single -= 1
        else:
            listed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._hurried.append(listed)
            self._hurry.set()
            await self.unless_broken(listed)
        return watch.view

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            began = self._clock.monotonic()
            waiting, self._hurried = self._hurried, []
            self._hurry.clear()
            await self._list(began)
            _wake(waiting)
            await self._pause(began)

    def _release(self) -> None:
        _wake(self._hurried)
        self._hurried = []

    async def _pause(self, began: float) -> None:
        """Until the next list is due: an interval after the last one began, sooner if somebody is in a hurry."""
        spent = self._clock.monotonic() - began
        await self._clock.sleep(max(0.0, min(HURRIED_S, self._every_s) - spent))
        await sleep_unless(self._clock, self._every_s - (self._clock.monotonic() - began), self._hurry)

    async def _list(self, began: float) -> None:
        """Take the zone's lists; of one slice alone the two gets are no more calls, and far less data."""
        if len(self._watches) == 1 and not self._kept:
            ((name, watches),) = self._watches.items()
            await self._look_at(name, watches)
            return
        serial = next(self._serials)
        try:
            queued_resources, nodes = await asyncio.gather(
                self._cloud.list_queued_resources(self.name), self._cloud.list_nodes(self.name)
            )
        except CloudError as error:
            for watch in self._all():
                watch.hear(serial, error)
            return
        queued, found = {one.name: one for one in queued_resources}, {node.name: node for node in nodes}
        self.newest = ZoneLook(began, queued, found)
        doubtful: dict[str, list[Watch]] = {}
        for watch in self._all():
            answer = queued.get(watch.name), found.get(watch.name)
            if not absent(look_of(*answer, spot=watch.spot, was_ready=watch.was_ready)):
                watch.hear(serial, answer)
            elif not (watch.view.gone if answer[0] is None else watch.view.lost):
                doubtful.setdefault(watch.name, []).append(watch)
        await self._confirm(doubtful)

    def _all(self) -> list[Watch]:
        return [watch for watches in self._watches.values() for watch in watches]

    async def _confirm(self, doubtful: Mapping[str, list[Watch]]) -> None:
        """Ask for each slice that the list lacks by itself, a few at a time."""
        left = itertools.islice(doubtful.items(), CONFIRMED_A_LIST)

        async def ask() -> None:
            for name, watches in left:
                await self._look_at(name, watches)

        await asyncio.gather(*(ask() for _ in range(min(SINGLE_LOOKS, len(doubtful)))))

    async def _look_at(self, name: str, watches: Iterable[Watch]) -> None:
        serial = next(self._serials)
        try:
            look = await take_look(self._cloud, self.name, name, spot=True, was_ready=True)
            answer = look.queued_resource, look.node
        except CloudError as error:
            answer = error
        for watch in list(watches):
            watch.hear(serial, answer)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
