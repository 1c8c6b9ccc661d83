"""Everything the emulated cloud holds, in memory: nodes, queued resources, limits and delays."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpu.emulator import messages
from tpu.emulator.capacity import Ask, CreationBudget, Limits, Provisioning, Usage
from tpu.emulator.names import Location
from tpu.topology import AcceleratorType

if TYPE_CHECKING:
    from tpu.emulator.host_pool import EmulatedHost

NOTICE_SECONDS = 30.0  # between the soft-off and the hard-off of a real spot VM


@dataclass(frozen=True)
class Settings:
    """What the control API can turn. Times are seconds."""

    limits: Limits = field(default_factory=Limits)
    provisioning_delay_s: float = 0.0
    delete_delay_s: float = 0.0
    notice_s: float = NOTICE_SECONDS
    suspend_delay_s: float = 0.1  # how long a queued resource shows SUSPENDING


@dataclass(eq=False)
class NodeRecord:
    """One node: its API message, and what stands behind it.

    `unwanted` is set when whatever is under way with it should stop (it is deleted, preempted, stopped).
    `making` is the task that boots its hosts. `has_hardware` is True from placement until the hosts are
    confirmed gone, whatever state the message shows.
    """

    location: Location
    node_id: str
    message: Any
    kind: AcceleratorType
    provisioning: Provisioning
    queued: str | None = None
    addresses: tuple[str, ...] = ()
    hosts: tuple[EmulatedHost, ...] = ()
    host_keys: tuple[str, ...] = ()  # outlive the hosts, as guest attributes do
    making: asyncio.Task[None] | None = None
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    has_hardware: bool = False
    announced: asyncio.Event = field(default_factory=asyncio.Event)  # the metadata says preempted
    killing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.location.child("nodes", self.node_id)

    @property
    def state(self) -> str:
        return messages.NodeState(self.message.state).name

    def show(self, state: str) -> None:
        """Let the API show this state; health follows it."""
        self.message.state = messages.NodeState[state]
        self.message.health = messages.NodeHealth["HEALTHY" if state == "READY" else "HEALTH_UNSPECIFIED"]


@dataclass(eq=False)
class QueuedRecord:
    """One queued resource, and the task that leads it from waiting to ACTIVE."""

    location: Location
    queued_id: str
    message: Any
    ask: Ask
    node_ids: tuple[str, ...]
    running: asyncio.Task[None] | None = None
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
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


@dataclass(eq=False)
class World:
    """All records by resource name. `changed()` wakes those who wait for capacity."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    queued: dict[str, QueuedRecord] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    budget: CreationBudget | None = None
    preempted: list[str] = field(default_factory=list)  # ids of nodes, in the order of their preemption
    background: Background = field(default_factory=Background)
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return an event that is set at the next change; take it before looking at the state."""
        return self._change

    def usage(self, ask: Ask) -> Usage:
        """Count what the asked kind uses in the asked zone."""
        nodes = [n for n in self.nodes.values() if (n.location.zone, n.kind.name) == ask.where]
        hardware = [n for n in nodes if n.has_hardware]
        queued = sum(q.ask.slices for q in self.queued.values() if q.ask.where == ask.where)
        return Usage(
            holding_quota=sum(n.queued is None for n in nodes) + queued,
            holding_hardware=len(hardware),
            holding_reservation=sum(n.provisioning == "reserved" for n in hardware),
        )

    def siblings(self, queued_name: str) -> list[NodeRecord]:
        return [node for node in self.nodes.values() if node.queued == queued_name]
