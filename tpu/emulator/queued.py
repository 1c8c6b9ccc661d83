"""Life of queued resources: wait for capacity, make the nodes, suspend when one is lost, delete."""

from __future__ import annotations

import asyncio
from typing import Any

from tpu.clock import Clock, sleep_unless
from tpu.emulator import errors, messages
from tpu.emulator.capacity import Ask, Placed, Refused, Wait, place
from tpu.emulator.errors import ApiError
from tpu.emulator.names import Location
from tpu.emulator.nodes import Nodes, schedule
from tpu.emulator.state import NodeRecord, QueuedRecord, World

_ENDED = {"FAILED", "DELETING", "SUSPENDING", "SUSPENDED"}


class QueuedResources:
    """Everything that happens to queued resources."""

    def __init__(self, world: World, nodes: Nodes, clock: Clock) -> None:
        self._world = world
        self._nodes = nodes
        self._clock = clock
        nodes.on_lost = self._node_lost

    def create(
        self, location: Location, queued_id: str, wanted: Any, ask: Ask, node_ids: tuple[str, ...]
    ) -> QueuedRecord:
        """Accept a checked queued resource; it then waits for capacity on its own."""
        message = messages.QueuedResource()
        message.CopyFrom(wanted)
        message.name = location.child("queuedResources", queued_id)
        message.create_time.FromNanoseconds(int(self._clock.time() * 1e9))
        for spec in message.tpu.node_spec:
            spec.parent = str(location)
            schedule(spec.node.scheduling_config, ask.provisioning)
        record = QueuedRecord(location, queued_id, message, ask, node_ids)
        record.show("WAITING_FOR_RESOURCES", "USER")
        self._world.queued[record.name] = record
        record.running = self._world.background.start(self._run(record))
        return record

    async def _run(self, record: QueuedRecord) -> None:
        try:
            if not await self._wait_for_capacity(record):
                return
            await self._make_nodes(record)
        except ApiError as error:
            if record.state not in _ENDED:
                record.fail(error.code, error.message)
                await asyncio.gather(*(self._nodes.remove(n) for n in self._world.siblings(record.name)))

    async def _wait_for_capacity(self, record: QueuedRecord) -> bool:
        """Wait until there is hardware and the time is right; False if it is no longer wanted.

        Raises:
            ApiError: there will be none: a stockout, a full reservation, or its time is over.
        """
        begin, end = valid_interval(record.message)
        await sleep_unless(self._clock, begin - self._clock.time(), record.unwanted)
        line = self._world.line(record.ask)
        line[record.name] = record
        try:
            return await self._wait_in_line(record, end)
        finally:
            del line[record.name]
            self._world.changed()  # whoever is behind may fit where this one was called to

    async def _wait_in_line(self, record: QueuedRecord, end: float) -> bool:
        while not record.unwanted.is_set():
            record.turn.clear()
            match place(self._world.settings.limits, record.ask, self._world.usage(record.ask)):
                case Placed():
                    return True
                case Refused(error):
                    raise error
                case Wait(reason):
                    record.waits_for = reason
            left = min(end - self._clock.time(), 3600.0)
            if left <= 0:
                raise ApiError(
                    4, f"The queued resource was valid until {end:.0f} and no capacity came: {reason}"
                )
            await sleep_unless(self._clock, left, record.turn, record.unwanted)
        return False

    async def _make_nodes(self, record: QueuedRecord) -> None:
        record.show("PROVISIONING")
        record.waits_for = ""
        spec = record.message.tpu.node_spec[0]
        made = []
        for node_id, name in zip(record.node_ids, record.node_names, strict=True):
            if name in self._world.nodes:
                raise errors.already_exists(name)
            made.append(
                self._nodes.place(
                    record.location,
                    node_id,
                    spec.node,
                    record.ask.kind,
                    record.ask.provisioning,
                    queued=record.name,
                    max_run_s=record.ask.max_run_s,
                )
            )
            made[-1].message.multislice_node = len(record.node_ids) > 1
        await asyncio.wait([node.making for node in made if node.making is not None])
        problems = [node.making.exception() for node in made if node.making is not None]
        for problem in problems:
            if isinstance(problem, ApiError) and problem.code == 13:
                raise problem
        # Any other problem is a node that was preempted or deleted: that suspends us, see _node_lost.
        if record.state == "PROVISIONING" and not any(problems):
            record.show("ACTIVE")
            if record.ask.max_run_s is not None:
                end = made[0].message.scheduling_config.termination_timestamp
                record.message.run_duration.termination_time.CopyFrom(end)

    def _node_lost(self, node: NodeRecord, initiator: str) -> None:
        """A node was preempted or deleted: what the queued resource holds is given up."""
        record = self._world.queued.get(node.queued or "")
        if record is None or record.state in _ENDED:
            return
        record.show("SUSPENDING", initiator)
        self._world.background.start(self._suspend(record, initiator))

    async def _suspend(self, record: QueuedRecord, initiator: str) -> None:
        others = [n for n in self._world.siblings(record.name) if n.state in ("READY", "CREATING")]
        await asyncio.gather(*(self._nodes.preempt(node, notice_s=0) for node in others))
        await sleep_unless(self._clock, self._world.settings.suspend_delay_s, record.unwanted)
        if record.state == "SUSPENDING":
            record.show("SUSPENDED", initiator)

    async def delete(self, record: QueuedRecord) -> Any:
        """Delete a queued resource and all nodes it holds; returns when the API no longer knows them."""
        record.show("DELETING", "USER")
        record.unwanted.set()
        nodes = self._world.siblings(record.name)
        for node in nodes:
            node.show("DELETING")
            node.unwanted.set()
        if record.running is not None:
            await asyncio.wait([record.running])
        nodes = self._world.siblings(record.name)  # once more: it may have made some in the meantime
        if nodes:
            await asyncio.gather(*(self._nodes.delete(node) for node in nodes))
        else:
            await self._clock.sleep(self._world.settings.delete_delay_s)
        if self._world.queued.get(record.name) is record:
            del self._world.queued[record.name]
        self._world.changed()
        return record.message

    async def reset(self, record: QueuedRecord) -> Any:
        """Let a suspended or failed queued resource wait for capacity anew, its dead nodes deleted."""
        for node in self._world.siblings(record.name):
            await self._nodes.delete(node)
        record.show("WAITING_FOR_RESOURCES", "USER")
        record.running = self._world.background.start(self._run(record))
        return record.message


def find(world: World, name: str) -> QueuedRecord:
    """Return a queued resource by its full name.

    Raises:
        ApiError: there is none.
    """
    if name not in world.queued:
        raise errors.not_found(name)
    return world.queued[name]


def valid_interval(queued: Any) -> tuple[float, float]:
    """Return from when until when a queued resource may be provisioned, in seconds since the epoch."""
    begin, end = 0.0, float("inf")
    policy = queued.queueing_policy
    created = queued.create_time.ToNanoseconds() / 1e9
    kind = policy.WhichOneof("start_timing_constraints")
    if kind == "valid_until_duration":
        end = created + policy.valid_until_duration.ToNanoseconds() / 1e9
    elif kind == "valid_until_time":
        end = policy.valid_until_time.ToNanoseconds() / 1e9
    elif kind == "valid_after_duration":
        begin = created + policy.valid_after_duration.ToNanoseconds() / 1e9
    elif kind == "valid_after_time":
        begin = policy.valid_after_time.ToNanoseconds() / 1e9
    elif kind == "valid_interval":
        begin = policy.valid_interval.start_time.ToNanoseconds() / 1e9
        end = policy.valid_interval.end_time.ToNanoseconds() / 1e9
    return begin, end
