"""Life of nodes: made, updated, stopped, started, preempted, deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from google.protobuf import empty_pb2

from tpu.clock import Clock, sleep_unless
from tpu.emulator import checks, errors, messages
from tpu.emulator.capacity import Ask, Provisioning, Refused, Wait, place
from tpu.emulator.errors import ApiError
from tpu.emulator.host_fleet import HostFleet
from tpu.emulator.names import Location
from tpu.emulator.state import NodeRecord, World
from tpu.topology import AcceleratorType

_log = logging.getLogger(__name__)

# Queued resources hear of a node that they hold and that is lost: (node, who brought it about).
OnLost = Callable[[NodeRecord, str], None]


class Nodes:
    """Everything that happens to nodes. Methods change records at once; what takes time is awaited."""

    def __init__(self, world: World, fleet: HostFleet, clock: Clock) -> None:
        self._world = world
        self._fleet = fleet
        self._clock = clock
        self.on_lost: OnLost | None = None

    # --- making -------------------------------------------------------------------------------------

    def place(
        self,
        location: Location,
        node_id: str,
        wanted: Any,
        kind: AcceleratorType,
        provisioning: Provisioning,
        queued: str | None = None,
        max_run_s: float | None = None,
    ) -> NodeRecord:
        """Add a node in state CREATING and start to boot it; `record.making` ends when it is READY.

        The caller has checked everything, capacity too.
        """
        message = messages.Node()
        message.CopyFrom(wanted)
        message.name = location.child("nodes", node_id)
        message.id = self._world.luck.getrandbits(62)
        message.accelerator_type = kind.name
        message.accelerator_config.type_ = config_type(kind)
        message.accelerator_config.topology = kind.topology
        message.api_version = messages.ApiVersion["V2_ALPHA1"]
        message.queued_resource = queued or ""
        schedule(message.scheduling_config, provisioning)
        message.create_time.FromNanoseconds(int(self._clock.time() * 1e9))
        record = NodeRecord(location, node_id, message, kind, provisioning, queued, max_run_s)
        record.has_hardware = True
        record.show("CREATING")
        self._fleet.give_addresses(record)
        self._world.nodes[record.name] = record
        record.making = self._world.background.start(self._make(record))
        return record

    def create(self, location: Location, node_id: str, wanted: Any, ask: Ask) -> NodeRecord | ApiError:
        """Place a node that was asked for by CreateNode, or return why its operation fails."""
        match place(self._world.settings.limits, ask, self._world.usage(ask)):
            case Refused(error):
                return error
            case Wait():
                return errors.no_capacity(location.zone)
        return self.place(location, node_id, wanted, ask.kind, ask.provisioning)

    async def _make(self, record: NodeRecord) -> None:
        await sleep_unless(self._clock, self._world.settings.provisioning_delay_s, record.unwanted)
        await self._boot(record)
        life_s = self._world.settings.preemptible_life_s
        if record.provisioning == "preemptible":
            self._world.background.start(self._end_of_life(record, life_s))
        elif record.max_run_s is not None:
            end = self._clock.time() + record.max_run_s
            record.message.scheduling_config.termination_timestamp.FromNanoseconds(int(end * 1e9))
            self._world.background.start(self._end_of_run(record, record.max_run_s))

    async def _boot(self, record: NodeRecord) -> None:
        if not record.unwanted.is_set():
            try:
                await self._fleet.boot(record)
            except Exception as error:
                # Whatever kept a host from booting is an internal error to the one who asked for the node.
                _log.exception("could not boot %s", record.name)
                record.has_hardware = False
                raise ApiError(13, f"an internal error has occurred: {error!r}") from error
        if record.unwanted.is_set():
            if record.state == "CREATING" or record.state == "DELETING":
                raise ApiError(1, "The node was deleted while it was being created.")
            raise errors.wrong_state("update", record.state)
        record.show("READY")
        self._world.changed()

    async def created(self, record: NodeRecord) -> Any:
        """Wait until a node that CreateNode asked for is READY and return its message.

        Raises:
            ApiError: it was preempted or deleted meanwhile, or could not boot.
        """
        assert record.making is not None
        try:
            await asyncio.shield(record.making)
        except ApiError as error:
            if error.code == 13:
                await self.remove(record)
            raise
        return record.message

    # --- changing -----------------------------------------------------------------------------------

    async def update(self, record: NodeRecord, wanted: Any, paths: list[str]) -> Any:
        for path in paths:
            if path == "labels":
                record.message.labels.clear()
                record.message.labels.update(wanted.labels)
            elif path == "metadata":
                record.message.metadata.clear()
                record.message.metadata.update(wanted.metadata)
            elif path == "tags":
                record.message.tags[:] = wanted.tags
            else:
                record.message.description = wanted.description
        if "metadata" in paths:
            await self._fleet.push_attributes(record)
        return record.message

    async def stop(self, record: NodeRecord) -> Any:
        record.show("STOPPING")
        record.unwanted.set()
        await self._fleet.kill(record)
        record.show("STOPPED")
        self._world.changed()
        return record.message

    def start(self, record: NodeRecord) -> None:
        """Boot a stopped node again; `record.making` ends when it is READY."""
        record.show("STARTING")
        record.unwanted = asyncio.Event()
        record.has_hardware = True
        record.making = self._world.background.start(self._make(record))

    # --- ending -------------------------------------------------------------------------------------

    async def preempt(
        self, record: NodeRecord, *, notice_s: float, state: str = "PREEMPTED", linger_s: float = 0.0
    ) -> None:
        """Preempt a node: its metadata says so at once, after `notice_s` its hosts are killed.

        `state` is what the API then shows; `gone` removes the node. With `linger_s` the API shows the end
        so much earlier than the processes meet it (a preempted process that lives on for a while).
        """
        if notice_s > 0:
            await asyncio.gather(*(host.set_preempted(True) for host in record.hosts))
            record.announced.set()
            await sleep_unless(self._clock, notice_s, record.unwanted)
            if record.unwanted.is_set():
                return  # deleted, or preempted for good, in the meantime
        self._world.preempted.append(record.node_id)
        if state == "gone":
            self._world.nodes.pop(record.name, None)
        else:
            record.show(state)
        if linger_s <= 0:
            await self._take_down(record)
        if self.on_lost is not None and record.queued:
            self.on_lost(record, "SERVICE")
        if linger_s > 0:
            await sleep_unless(self._clock, linger_s, record.unwanted)
            await self._take_down(record)
        if state == "gone":
            self._fleet.free_addresses(record)

    async def _end_of_life(self, record: NodeRecord, seconds: float) -> None:
        await sleep_unless(self._clock, seconds, record.unwanted)
        if not record.unwanted.is_set() and not record.announced.is_set():
            await self.preempt(record, notice_s=self._world.settings.notice_s)

    async def _end_of_run(self, record: NodeRecord, seconds: float) -> None:
        """Delete a flex-start node, unannounced, once it has run for as long as was asked for."""
        await sleep_unless(self._clock, seconds, record.unwanted)
        if not record.unwanted.is_set():
            await self.remove(record)
            if self.on_lost is not None and record.queued:
                self.on_lost(record, "SERVICE")

    async def repair(self, record: NodeRecord, seconds: float, *, maintenance: bool, reboot: bool) -> None:
        """Take a node's hosts away for so long; then it is READY again, unless it was deleted meanwhile.

        It shows REPAIRING, or for maintenance stays READY with a health that says so. With `reboot` its hosts
        die and are made anew, without it they are as frozen; both leave nobody there who answers.
        """
        if maintenance:
            record.message.health = messages.NodeHealth["UNHEALTHY_MAINTENANCE"]
            record.message.upcoming_maintenance.maintenance_status = messages.MaintenanceStatus["ONGOING"]
        else:
            record.show("REPAIRING")
        if reboot:
            await self._fleet.kill(record)
            record.has_hardware = True  # it is ours all the time
        else:
            await asyncio.gather(*(host.hang() for host in record.hosts))
        await sleep_unless(self._clock, seconds, record.unwanted)
        if record.unwanted.is_set():
            return
        record.message.ClearField("upcoming_maintenance")
        if reboot:
            record.making = self._world.background.start(self._boot(record))
            await record.making
        else:
            await asyncio.gather(*(host.resume() for host in record.hosts))
            record.show("READY")

    async def delete(self, record: NodeRecord) -> Any:
        """Delete a node; returns when its hosts are gone and the API no longer knows it."""
        record.show("DELETING")
        await self._take_down(record)
        await self._clock.sleep(self._world.settings.delete_delay_s)
        await self.remove(record)
        if self.on_lost is not None and record.queued:
            self.on_lost(record, "USER")
        return empty_pb2.Empty()

    async def _take_down(self, record: NodeRecord) -> None:
        """Stop what is under way with a node and kill its hosts, confirmed."""
        record.unwanted.set()
        if record.making is not None:
            # A boot under way is let end, so that no host of it escapes.
            await asyncio.wait([record.making])
        await self._fleet.kill(record)
        self._world.changed()

    async def remove(self, record: NodeRecord) -> None:
        """Forget a node whose hosts are gone, and free its addresses."""
        await self._take_down(record)
        self._fleet.free_addresses(record)
        if self._world.nodes.get(record.name) is record:
            del self._world.nodes[record.name]
        self._world.changed()


def schedule(config: Any, provisioning: Provisioning) -> None:
    """Let a scheduling configuration say how its node is provisioned."""
    config.spot = provisioning == "spot"
    config.preemptible = provisioning == "preemptible"
    config.reserved = provisioning == "reserved"


def find(world: World, name: str) -> NodeRecord:
    """Return a node by its full name.

    Raises:
        ApiError: there is none.
    """
    if name not in world.nodes:
        raise errors.not_found(name)
    return world.nodes[name]


def check_update(record: NodeRecord, wanted: Any, paths: list[str]) -> None:
    """Refuse an update of fields that cannot change, of bad values, or in a state that does not allow it."""
    if not paths:
        raise errors.bad_request("update_mask must name at least one field.")
    for path in paths:
        if path not in checks.UPDATABLE:
            raise errors.bad_request(
                f"The field '{path}' cannot be updated; these can: {', '.join(sorted(checks.UPDATABLE))}."
            )
    checks.check_state("update", record.state)
    checks.check_labels(wanted.labels)
    checks.check_metadata(wanted.metadata)


def config_type(kind: AcceleratorType) -> int:
    """Return the API's number of a generation."""
    name = {"v5litepod": "V5LITE_POD"}.get(kind.generation, kind.generation.upper())
    return messages.AcceleratorConfigType[name].value
