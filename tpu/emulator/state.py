"""Everything the emulated cloud holds, in memory: nodes, queued resources, limits and delays."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

from tpu.emulator import messages
from tpu.emulator.capacity import Ask, CreationBudget, Limits, Provisioning, Usage, Where
from tpu.emulator.names import Location
from tpu.emulator.project import Project
from tpu.emulator.records import Records
from tpu.topology import AcceleratorType

if TYPE_CHECKING:
    from tpu.emulator.host_fleet import Host

PREEMPTIBLE_LIFE_SECONDS = 24 * 3600.0
NOTICE_SECONDS = 30.0  # between the soft-off and the hard-off of a real spot VM


@dataclass(frozen=True)
class Settings:
    """What the control API can turn. Times are seconds."""

    limits: Limits = field(default_factory=Limits)
    provisioning_delay_s: float = 0.0
    delete_delay_s: float = 0.0
    notice_s: float = NOTICE_SECONDS
    suspend_delay_s: float = 0.1  # how long a queued resource shows SUSPENDING
    preemptible_life_s: float = PREEMPTIBLE_LIFE_SECONDS  # of nodes that become READY from now on
    without_queues: frozenset[str] = frozenset()  # zones that know no queued resources
    project: Project = field(default_factory=Project)


@dataclass(eq=False)
class NodeRecord:
    """One node: its API message, and what stands behind it.

    `unwanted` is set when whatever is under way with it should stop (it is deleted, preempted, stopped).
    `making` is the task that boots its hosts. `max_run_s` is how long it may be READY at most, if it is a
    flex-start node. `tally` is where its hardware counts, while it is in a world.
    """

    location: Location
    node_id: str
    message: Any
    kind: AcceleratorType
    provisioning: Provisioning
    queued: str | None = None
    max_run_s: float | None = None
    addresses: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    host_keys: tuple[str, ...] = ()  # outlive the hosts, as guest attributes do
    making: asyncio.Task[None] | None = None
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    announced: asyncio.Event = field(default_factory=asyncio.Event)  # the metadata says preempted
    killing: asyncio.Lock = field(default_factory=asyncio.Lock)
    tally: Tally | None = None
    _has_hardware: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return self.location.child("nodes", self.node_id)

    @property
    def where(self) -> Where:
        return self.location.zone, self.kind.name

    @property
    def has_hardware(self) -> bool:
        """True from placement until the hosts are confirmed gone, whatever state the message shows."""
        return self._has_hardware

    @has_hardware.setter
    def has_hardware(self, value: bool) -> None:
        if value != self._has_hardware:
            self._has_hardware = value
            if self.tally is not None:
                self.tally.count(self, 1 if value else -1)

    @property
    def state(self) -> str:
        return messages.NodeState(self.message.state).name

    def show(self, state: str) -> None:
        """Let the API show this state; health follows it."""
        self.message.state = messages.NodeState[state]
        self.message.health = messages.NodeHealth["HEALTHY" if state == "READY" else "HEALTH_UNSPECIFIED"]


@dataclass(eq=False)
class QueuedRecord:
    """One queued resource, and the task that leads it from waiting to ACTIVE.

    `turn` is set when there may be capacity for it.
    """

    location: Location
    queued_id: str
    message: Any
    ask: Ask
    node_ids: tuple[str, ...]
    running: asyncio.Task[None] | None = None
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for: str = ""

    @property
    def name(self) -> str:
        return self.location.child("queuedResources", self.queued_id)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(self.location.child("nodes", node_id) for node_id in self.node_ids)

    @property
    def state(self) -> str:
        return messages.QueuedState(self.message.state.state).name

    def show(self, state: str, initiator: str = "SERVICE") -> None:
        """Let the API show this state, and who brought it about."""
        shown = self.message.state
        shown.Clear()
        shown.state = messages.QueuedState[state]
        shown.state_initiator = messages.StateInitiator[initiator]
        data = {"WAITING_FOR_RESOURCES": None, "FAILED": "failed_data"}.get(state, f"{state.lower()}_data")
        if data is not None:
            getattr(shown, data).SetInParent()

    def fail(self, code: int, message: str) -> None:
        self.show("FAILED")
        self.message.state.failed_data.error.code = code
        self.message.state.failed_data.error.message = message


class Background:
    """Tasks that outlive the call that started them, and end with the emulator or a reset."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits it reports it; asyncio need not warn as well

    async def cancel_all(self) -> None:
        """Cancel every task but the caller's, and return when they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass
class Tally:
    """How many slices there are of one kind in one zone, and the line of those who wait for one."""

    holding_quota: int = 0
    holding_hardware: int = 0
    holding_reservation: int = 0
    line: dict[str, QueuedRecord] = field(default_factory=dict)

    def count(self, node: NodeRecord, change: int) -> None:
        """Count hardware that a node gains (+1) or loses (-1)."""
        self.holding_hardware += change
        if node.provisioning == "reserved":
            self.holding_reservation += change

    def call(self, capacity: int | None) -> None:
        """Let the first in line look whether there is capacity for them: as many as there is room for."""
        free = math.inf if capacity is None else capacity - self.holding_hardware
        for record in self.line.values():
            if free <= 0:
                return
            if record.ask.slices <= free:
                free -= record.ask.slices
                record.turn.set()


class World:
    """All records by resource name. `changed()` wakes those who wait for capacity.

    No answer takes longer for records that it is not about: fleets can have thousands. Ids are drawn from `luck`.
    """

    def __init__(self, luck: Random | None = None) -> None:
        self.luck = luck or SystemRandom()
        self.nodes: Records[NodeRecord] = Records(self._count_node)
        self.queued: Records[QueuedRecord] = Records(self._count_queued)
        self.settings = Settings()
        self.budget: CreationBudget | None = None
        self.preempted: list[str] = []  # ids of nodes, in the order of their preemption
        self.background = Background()
        self._change = asyncio.Event()
        self._tallies: defaultdict[Where, Tally] = defaultdict(Tally)
        self._siblings: defaultdict[str, dict[str, NodeRecord]] = defaultdict(dict)
        self._claimed: Counter[str] = Counter()

    def changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        limits = self.settings.limits
        for where, tally in self._tallies.items():
            tally.call(None if where in limits.stockouts else limits.capacity.get(where))

    def line(self, ask: Ask) -> dict[str, QueuedRecord]:
        """Return who waits for what is asked, by name, in the order of their coming."""
        return self._tallies[ask.where].line

    def next_change(self) -> asyncio.Event:
        """Return an event that is set at the next change; take it before looking at the state."""
        return self._change

    def usage(self, ask: Ask) -> Usage:
        """Count what the asked kind uses in the asked zone."""
        tally = self._tallies[ask.where]
        return Usage(tally.holding_quota, tally.holding_hardware, tally.holding_reservation)

    def siblings(self, queued_name: str) -> list[NodeRecord]:
        """Return the nodes that a queued resource holds."""
        return list(self._siblings.get(queued_name, {}).values())

    def node_name_taken(self, name: str) -> bool:
        """True if there is a node of this name, or a queued resource that makes one."""
        return name in self.nodes or self._claimed[name] > 0

    def _count_node(self, node: NodeRecord, change: int) -> None:
        tally = self._tallies[node.where]
        node.tally = tally if change > 0 else None
        if node.has_hardware:
            tally.count(node, change)
        if node.queued is None:
            tally.holding_quota += change
        elif change > 0:
            self._siblings[node.queued][node.name] = node
        else:
            del self._siblings[node.queued][node.name]
            if not self._siblings[node.queued]:
                del self._siblings[node.queued]

    def _count_queued(self, record: QueuedRecord, change: int) -> None:
        self._tallies[record.ask.where].holding_quota += change * record.ask.slices
        for name in record.node_names:
            self._claimed[name] += change
            if not self._claimed[name]:
                del self._claimed[name]
