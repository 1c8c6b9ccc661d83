"""Follow a gang from start to end: what its hosts say, what the cloud says, and the first sign of trouble.

The watch only looks; it never ends a gang or deletes a slice. A dropped connection is no verdict: the host is
tried again for a moment, and the cloud is asked before anybody is blamed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tpu.clock import Clock
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.connect import HostUnreachable, connect_all
from tpu.hosts.gang import Beat, Event, Exit, GangSpec, Log, Lost, Notice, follow_gang
from tpu.hosts.identity import Identity
from tpu.runs.trouble import condition_after_trouble
from tpu.slices.condition import LifeView

# A host that cannot be connected to for so long after a drop is lost. One that refuses each of many tries is so
# sooner: an SSH server that was killed is back within about a second, and the tries of a busy machine come slower.
RECONNECT_S = 2.0
REFUSED_S, REFUSED_TRIES = 1.4, 10
RETRY_S = 0.1
# A dropped connection is most often a preemption, and the cloud knows of that sooner: it is asked this often then.
DROPPED_POLL_S = 0.5
# What the other hosts say within this time after the first trouble belongs to the same verdict.
SETTLE_S = 1.0
# Whether others want the slice is known from a lease that is renewed beside; this only looks at what was heard.
LEASE_LOOK_S = 0.2
LOG_TAIL_LINES = 50
# What a shell answers when it cannot run a command.
NOT_STARTED = 127


class Listener(Protocol):
    """Hears what a gang says, in the order in which it arrives."""

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None: ...

    def on_end(self) -> None:
        """Nothing more is heard of this gang; another one may follow."""
        ...


class CloudWord(Protocol):
    """What the cloud says of the gang's slice: tpu.slices.monitor.Watch is one."""

    @property
    def view(self) -> LifeView: ...

    async def changed(self, known: LifeView) -> LifeView:
        """Its word as soon as it is another than `known`."""
        ...

    async def look_now(self) -> LifeView: ...


@dataclass
class HostView:
    """What is known of one host's part of the gang."""

    address: HostAddress
    exit_code: int | None = None
    exit_signal: int | None = None
    noticed: bool = False
    lost: str | None = None
    ended_at: float | None = None
    ended_by_us: bool = False
    out_of_touch: bool = False
    log_offset: int = 0
    event_offset: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL_LINES))

    @property
    def exited(self) -> bool:
        return self.exit_code is not None or self.exit_signal is not None

    @property
    def failed(self) -> bool:
        return self.lost is not None or (self.exited and self.exit_code != 0)


@dataclass
class GangView:
    """What is known of a gang. Times are seconds since 1970 on the clock of the flow's machine.

    `members` has what is known of each run of a pack; they have no hosts of their own.
    """

    hosts: list[HostView]
    step: int = 0
    resumed: int | None = None
    committed: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    phases: list[tuple[float, str]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)
    diverged: str | None = None
    bad: str | None = None  # how its slice was found to compute other numbers than others do
    hung_s: float | None = None
    life_over: str | None = None
    evicted: str | None = None
    cloud: LifeView | None = None
    members: dict[str, GangView] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return all(host.exited and host.exit_code == 0 for host in self.hosts)

    @property
    def told_to_leave(self) -> bool:
        """Whether it is ended for what it has no part in."""
        return self.life_over is not None or self.evicted is not None

    @property
    def in_trouble(self) -> bool:
        lost = self.cloud is not None and self.cloud.lost
        ends = lost or self.hung_s is not None or self.told_to_leave
        return ends or any(host.failed for host in self.hosts)


class GangWatch:
    """Follows one gang; `changed()` wakes whenever the view has moved."""

    def __init__(
        self,
        hosts: tuple[HostAddress, ...],
        spec: GangSpec,
        connection: Connection,
        identity: Identity,
        word: CloudWord,
        clock: Clock,
        listener: Listener,
        progress_s: float,
        save_at: tuple[float, str] | None = None,
        why_leave: Callable[[int], str | None] = lambda committed: None,
        last_step: int | None = None,
        output_counts: bool = False,
    ) -> None:
        """`save_at` is when the gang has to save because its slice's life is over (since 1970), and which life.

        `why_leave` is asked with the last step that is committed, and says why the gang has to leave its slice to
        others, as soon as that is so. With a commit of `last_step` it is about to leave by itself, and told nothing.
        With `output_counts` a line that the program prints is progress, too: of a foreign command no steps are known.
        """
        self.view = GangView([HostView(address) for address in hosts])
        self._spec = spec
        self._connection = connection
        self._identity = identity
        self._word = word
        self._clock = clock
        self._listener = listener
        self._progress_s = progress_s
        self._save_at = save_at
        self._why_leave = why_leave
        self._last_step = last_step
        self._output_counts = output_counts
        self._moved = asyncio.Event()
        self._dropped = asyncio.Event()
        self._last_progress = clock.monotonic()
        self._offset_s: float | None = None

    async def until_ended(self) -> GangView:
        """Follow until every host has exited well, or the gang is in trouble and the cloud has been asked."""
        tasks = [asyncio.create_task(self._follow_host(host)) for host in self.view.hosts]
        tasks += [asyncio.create_task(self._watch_cloud()), asyncio.create_task(self._watch_progress())]
        tasks.append(asyncio.create_task(self._watch_lease()))
        if self._save_at is not None:
            tasks.append(asyncio.create_task(self._watch_life(*self._save_at)))
        try:
            while not (self.view.finished or self.view.in_trouble):
                await self.changed(tasks)
            if self.view.in_trouble and not self._slice_is_lost and self.view.evicted is None:
                await self._settle()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._listener.on_end()
        return self.view

    async def changed(self, tasks: list[asyncio.Task[None]] | None = None) -> None:
        """Wait for the next change; a watcher that broke is raised here, not swallowed."""
        self._moved.clear()
        waiter = asyncio.create_task(self._moved.wait())
        running = [task for task in tasks or [] if not task.done()]
        try:
            await asyncio.wait([waiter, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        for task in tasks or []:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def _slice_is_lost(self) -> bool:
        return self.view.cloud is not None and self.view.cloud.lost

    async def _settle(self) -> None:
        """Let the other hosts finish their sentence, then ask the cloud once more.

        A host that is being tried again may be the dead one by which the others failed: that is found out first.
        """
        began = self._clock.monotonic()
        while open_ends := [h for h in self.view.hosts if not (h.exited or h.lost)]:
            patience_s = RECONNECT_S + SETTLE_S if any(h.out_of_touch for h in open_ends) else SETTLE_S
            if self._clock.monotonic() - began >= patience_s:
                break
            await self._clock.sleep(0.05)
        if all(host.lost for host in self.view.hosts):
            self.view.cloud = await condition_after_trouble(self._word.look_now, self._clock, all_lost=True)
        else:
            self.view.cloud = await self._word.look_now()

    async def _follow_host(self, host: HostView) -> None:
        dropped_at, tries = self._clock.monotonic(), 0
        while not host.exited:
            heard, lost = await self._listen(host)
            if host.exited:
                break
            if lost.final:
                self._lose(host, lost.reason)
                return
            now = self._clock.monotonic()
            dropped_at, tries = (now, 0) if heard else (dropped_at, tries + 1)
            host.out_of_touch = True
            self._dropped.set()
            silent_s = now - dropped_at
            if silent_s >= RECONNECT_S or (silent_s >= REFUSED_S and tries >= REFUSED_TRIES):
                self._lose(host, lost.reason)
                return
            await self._clock.sleep(RETRY_S)
        self._moved.set()

    async def _listen(self, host: HostView) -> tuple[bool, Lost]:
        """One connection, for as long as it lasts: whether anything was heard, and why it ended."""
        heard, ended = False, Lost(host.address, "the stream ended")
        try:
            async with connect_all(
                (host.address,), self._identity, self._connection, 0.0, lambda _: None
            ) as group:
                offsets = {host.address: (host.log_offset, host.event_offset)}
                async for signal in follow_gang(group, self._spec, offsets):
                    if isinstance(signal, Lost):
                        ended = signal
                        break
                    heard = True
                    self._in_touch(host)
                    self._hear(host, signal)
        except HostUnreachable as error:
            ended = Lost(host.address, str(error))
        return heard, ended

    def _in_touch(self, host: HostView) -> None:
        if host.out_of_touch:
            host.out_of_touch = False
            if not any(other.out_of_touch for other in self.view.hosts):
                self._dropped.clear()

    def _lose(self, host: HostView, reason: str) -> None:
        host.lost, host.ended_at = reason, self._clock.monotonic()
        self._moved.set()

    def _hear(self, host: HostView, signal: Any) -> None:
        match signal:
            case Log():
                if self._output_counts:
                    self._last_progress = self._clock.monotonic()
                host.log_offset = signal.offset
                host.tail.append(signal.line)
                self._listener.on_log(host.address, signal.line)
            case Event():
                host.event_offset = signal.offset
                self._note(host, signal.record)
                self._listener.on_event(host.address, signal.record)
            case Notice():
                host.noticed = True
            case Exit():
                host.exit_code, host.exit_signal = signal.code, signal.signal
                if signal.code is None and signal.signal is None:
                    host.exit_code = NOT_STARTED
                    host.tail.append(signal.reason or "the program could not be started")
                host.ended_at = self._clock.monotonic()
            case Beat():
                return
        self._moved.set()

    def _note(self, host: HostView, record: dict[str, Any]) -> None:
        """Keep what the verdict, the progress and the report need. Only process 0 tells of the run as a whole."""
        view = self.view
        if (member := record.get("member")) is not None:
            view = view.members.setdefault(member, GangView([]))
        if record["event"] == "bad":
            view.bad = record["reason"]
        if record["event"] == "diverged":  # on any host: a bad state may be in one host's part alone
            view.diverged = view.diverged or record["reason"]
        if host.address.index != 0:
            return
        now = self._clock.time()
        # The host's clock may differ (C4): what arrives soonest after it was written shows by how much.
        lag = now - record["t"]
        self._offset_s = lag if self._offset_s is None else min(self._offset_s, lag)
        at = record["t"] + self._offset_s
        match record["event"]:
            case "phase":
                view.phases.append((at, record["phase"]))
            case "step":
                view.step = record["step"]
                view.steps.append((at, record["step"]))
                view.metrics = {
                    k: v
                    for k, v in record.items()
                    if k not in ("t", "event", "step") and isinstance(v, int | float)
                }
                self._last_progress = self._clock.monotonic()
            case "commit":
                view.commits.append((at, record["step"]))
                view.committed = max(view.committed, record["step"])
                self._last_progress = self._clock.monotonic()
            case "logged" | "waiting":
                self._last_progress = self._clock.monotonic()
            case "restored":
                resumed = record["step"] or 0
                view.resumed, view.step = resumed, max(view.step, resumed)
                self._last_progress = self._clock.monotonic()

    async def _watch_cloud(self) -> None:
        seen = self._word.view
        while True:
            self.view.cloud = seen
            if seen.lost:
                self._moved.set()
                return
            seen = await self._next_word(seen)

    async def _next_word(self, known: LifeView) -> LifeView:
        """What the cloud says next: when it says something else, or soon after a host has dropped."""
        if self._dropped.is_set():
            await self._clock.sleep(DROPPED_POLL_S)
            return await self._word.look_now()
        dropped = asyncio.create_task(self._dropped.wait())
        changed = asyncio.create_task(self._word.changed(known))
        try:
            await asyncio.wait({dropped, changed}, return_when=asyncio.FIRST_COMPLETED)
            return changed.result() if changed.done() else known
        finally:
            dropped.cancel()
            changed.cancel()

    async def _watch_life(self, save_at: float, why: str) -> None:
        await self._clock.sleep(max(0.0, save_at - self._clock.time()))
        if not self._complete:
            self.view.life_over = why
            self._moved.set()

    async def _watch_lease(self) -> None:
        while not self._complete:
            if (why := self._why_leave(self.view.committed)) is not None:
                self.view.evicted = why
                self._moved.set()
                return
            await self._clock.sleep(LEASE_LOOK_S)

    @property
    def _complete(self) -> bool:
        return self._last_step is not None and self.view.committed >= self._last_step

    async def _watch_progress(self) -> None:
        while True:
            await self._clock.sleep(min(1.0, self._progress_s / 4))
            silent_s = self._clock.monotonic() - self._last_progress
            if silent_s > self._progress_s:
                self.view.hung_s = silent_s
                self._moved.set()
                return
