"""The service google.cloud.tpu.v2alpha1.Tpu: each method checks its request and hands it on."""

from __future__ import annotations

from typing import Any

from google.cloud.location import locations_pb2

from tpu.clock import Clock
from tpu.emulator import checks, errors, messages, nodes, queued, zones
from tpu.emulator.capacity import PREEMPTIBLE, CreationBudget, Refused, admit
from tpu.emulator.errors import ApiError
from tpu.emulator.names import Location, check_id, parse_location, parse_resource
from tpu.emulator.nodes import Nodes
from tpu.emulator.operations import OperationStore
from tpu.emulator.queued import QueuedResources
from tpu.emulator.state import NodeRecord, World
from tpu.topology import AcceleratorType

METHODS = (
    "ListNodes", "GetNode", "CreateNode", "DeleteNode", "StopNode", "StartNode", "UpdateNode",
    "ListQueuedResources", "GetQueuedResource", "CreateQueuedResource", "DeleteQueuedResource",
    "ResetQueuedResource", "GenerateServiceIdentity", "ListAcceleratorTypes", "GetAcceleratorType",
    "ListRuntimeVersions", "GetRuntimeVersion", "GetGuestAttributes", "SimulateMaintenanceEvent",
)  # fmt: skip


class TpuService:
    """One coroutine a method, named as the method. They raise ApiError for what they refuse."""

    def __init__(
        self,
        project: str,
        world: World,
        node_life: Nodes,
        queued_life: QueuedResources,
        operations: OperationStore,
        clock: Clock,
    ) -> None:
        self._project = project
        self._world = world
        self._nodes = node_life
        self._queued = queued_life
        self._operations = operations
        self._clock = clock

    # --- nodes --------------------------------------------------------------------------------------

    async def ListNodes(self, request: Any) -> Any:
        location = self._location(request.parent, every_zone=True)
        names, token = checks.page(
            self._world.nodes.names(location.zone), request.page_size, request.page_token
        )
        found = [self._world.nodes[name].message for name in names]
        return messages.response("ListNodes")(nodes=found, next_page_token=token)

    async def GetNode(self, request: Any) -> Any:
        return self._node(request.name).message

    async def CreateNode(self, request: Any) -> Any:
        location = self._location(request.parent)
        check_id("node_id", request.node_id)
        name = location.child("nodes", request.node_id)
        checks.check_request_id(request.request_id)
        if known := self._operations.recall("CreateNode", name, request.request_id):
            return known
        kind = checks.check_node(request.node, location.zone)
        self._check_node_name_free(name)
        ask = checks.Ask(location.zone, kind, checks.node_provisioning(request.node))
        self._admit(ask)
        made = self._nodes.create(location, request.node_id, request.node, ask)
        if isinstance(made, ApiError):
            operation = self._operations.failed(location, "create", name, made)
        else:
            operation = self._operations.start(location, "create", name, self._nodes.created(made))
        self._operations.remember("CreateNode", name, request.request_id, operation)
        return operation

    async def DeleteNode(self, request: Any) -> Any:
        location, _ = self._resource(request.name, "nodes")
        checks.check_request_id(request.request_id)
        if known := self._operations.recall("DeleteNode", request.name, request.request_id):
            return known
        record = self._node(request.name)
        checks.check_node_deletable(record.state)
        record.show("DELETING")
        operation = self._operations.start(location, "delete", request.name, self._nodes.delete(record))
        self._operations.remember("DeleteNode", request.name, request.request_id, operation)
        return operation

    async def StopNode(self, request: Any) -> Any:
        record = self._node(request.name)
        self._check_restartable("stop", record)
        return self._operations.start(record.location, "stop", request.name, self._nodes.stop(record))

    async def StartNode(self, request: Any) -> Any:
        record = self._node(request.name)
        self._check_restartable("start", record)
        self._nodes.start(record)
        return self._operations.start(record.location, "start", request.name, self._nodes.created(record))

    async def UpdateNode(self, request: Any) -> Any:
        record = self._node(request.node.name)
        paths = list(request.update_mask.paths)
        nodes.check_update(record, request.node, paths)
        message = await self._nodes.update(record, request.node, paths)
        return self._operations.finished(record.location, "update", record.name, message)

    async def GetGuestAttributes(self, request: Any) -> Any:
        record = self._node(request.name)
        checks.check_state("getGuestAttributes", record.state)
        workers = self._workers(record, request.worker_ids)
        found = []
        for worker in workers:
            attributes = messages.GuestAttributes(query_path=request.query_path)
            for namespace, key, value in guest_attributes(record, worker):
                if f"{namespace}/{key}".startswith(request.query_path):
                    attributes.query_value.items.add(namespace=namespace, key=key, value=value)
            found.append(attributes)
        return messages.response("GetGuestAttributes")(guest_attributes=found)

    async def SimulateMaintenanceEvent(self, request: Any) -> Any:
        record = self._node(request.name)
        checks.check_state("simulateMaintenanceEvent", record.state)
        self._workers(record, request.worker_ids)
        record.message.upcoming_maintenance.maintenance_status = messages.MaintenanceStatus["ONGOING"]
        return self._operations.finished(
            record.location, "simulateMaintenanceEvent", record.name, record.message
        )

    # --- queued resources ---------------------------------------------------------------------------

    async def ListQueuedResources(self, request: Any) -> Any:
        location = self._location(request.parent, every_zone=True)
        names, token = checks.page(
            self._world.queued.names(location.zone), request.page_size, request.page_token
        )
        found = [self._world.queued[name].message for name in names]
        return messages.response("ListQueuedResources")(queued_resources=found, next_page_token=token)

    async def GetQueuedResource(self, request: Any) -> Any:
        self._resource(request.name, "queuedResources")
        return queued.find(self._world, request.name).message

    async def CreateQueuedResource(self, request: Any) -> Any:
        location = self._location(request.parent)
        check_id("queued_resource_id", request.queued_resource_id)
        name = location.child("queuedResources", request.queued_resource_id)
        checks.check_request_id(request.request_id)
        if known := self._operations.recall("CreateQueuedResource", name, request.request_id):
            return known
        if location.zone in self._world.settings.without_queues:
            raise errors.no_queues(location.zone)
        ask, node_ids = checks.check_queued(request.queued_resource, location)
        if name in self._world.queued:
            raise errors.already_exists(name)
        for node_id in node_ids:
            self._check_node_name_free(location.child("nodes", node_id))
        self._admit(ask)
        record = self._queued.create(
            location, request.queued_resource_id, request.queued_resource, ask, node_ids
        )
        operation = self._operations.finished(location, "create", name, record.message)
        self._operations.remember("CreateQueuedResource", name, request.request_id, operation)
        return operation

    async def DeleteQueuedResource(self, request: Any) -> Any:
        location, _ = self._resource(request.name, "queuedResources")
        checks.check_request_id(request.request_id)
        if known := self._operations.recall("DeleteQueuedResource", request.name, request.request_id):
            return known
        record = queued.find(self._world, request.name)
        holds = [node.name for node in self._world.siblings(record.name)]
        checks.check_queued_deletable(record.state, holds, force=request.force)
        record.show("DELETING", "USER")
        operation = self._operations.start(location, "delete", request.name, self._queued.delete(record))
        self._operations.remember("DeleteQueuedResource", request.name, request.request_id, operation)
        return operation

    async def ResetQueuedResource(self, request: Any) -> Any:
        location, _ = self._resource(request.name, "queuedResources")
        record = queued.find(self._world, request.name)
        if record.state not in ("SUSPENDED", "FAILED"):
            raise ApiError(
                9, f"The queued resource is in state {record.state}: only SUSPENDED or FAILED ones are reset."
            )
        return self._operations.start(location, "reset", request.name, self._queued.reset(record))

    # --- what a zone offers -------------------------------------------------------------------------

    async def ListAcceleratorTypes(self, request: Any) -> Any:
        location = self._location(request.parent)
        offered = zones.accelerator_types(location.zone)
        names, token = checks.page(sorted(offered), request.page_size, request.page_token)
        found = [_type_message(location, offered[name]) for name in names]
        return messages.response("ListAcceleratorTypes")(accelerator_types=found, next_page_token=token)

    async def GetAcceleratorType(self, request: Any) -> Any:
        location, name = self._resource(request.name, "acceleratorTypes")
        offered = zones.accelerator_types(location.zone)
        if name not in offered:
            raise errors.not_found(request.name)
        return _type_message(location, offered[name])

    async def ListRuntimeVersions(self, request: Any) -> Any:
        location = self._location(request.parent)
        versions = list(zones.runtime_versions(location.zone))
        names, token = checks.page(versions, request.page_size, request.page_token)
        found = [_version_message(location, name) for name in names]
        return messages.response("ListRuntimeVersions")(runtime_versions=found, next_page_token=token)

    async def GetRuntimeVersion(self, request: Any) -> Any:
        location, name = self._resource(request.name, "runtimeVersions")
        if name not in zones.runtime_versions(location.zone):
            raise errors.not_found(request.name)
        return _version_message(location, name)

    async def GenerateServiceIdentity(self, request: Any) -> Any:
        self._location(request.parent)
        response = messages.response("GenerateServiceIdentity")()
        response.identity.email = f"service-{self._project}@cloud-tpu.emulated.gserviceaccount.com"
        return response

    async def ListLocations(self, request: Any) -> Any:
        project = request.name.removeprefix("projects/")
        if project != self._project:
            raise errors.project_denied(project)
        inside, token = checks.page(sorted(zones.GENERATIONS), request.page_size, request.page_token)
        found = [_location_message(Location(project, zone)) for zone in inside]
        return locations_pb2.ListLocationsResponse(locations=found, next_page_token=token)

    async def GetLocation(self, request: Any) -> Any:
        return _location_message(self._location(request.name))

    # --- shared -------------------------------------------------------------------------------------

    def _location(self, text: str, *, every_zone: bool = False) -> Location:
        location = parse_location(text)
        checks.check_location(location, self._project, every_zone=every_zone)
        return location

    def _resource(self, text: str, collection: str) -> tuple[Location, str]:
        location, resource_id = parse_resource(text, collection)
        checks.check_location(location, self._project)
        return location, resource_id

    def _node(self, name: str) -> NodeRecord:
        self._resource(name, "nodes")
        return nodes.find(self._world, name)

    def _check_node_name_free(self, name: str) -> None:
        """A node's name is taken by the node, and before that by the queued resource that will make it."""
        if self._world.node_name_taken(name):
            raise errors.already_exists(name)

    def _admit(self, ask: checks.Ask) -> None:
        """Spend a creation of the project's rate, then ask the quota."""
        per_minute = self._world.settings.limits.creations_per_minute
        now = self._clock.monotonic()
        budget = self._world.budget or CreationBudget(per_minute, now)
        self._world.budget, granted = budget.spend(now, per_minute, ask.slices)
        if not granted:
            raise errors.too_many_creations(per_minute)
        match admit(self._world.settings.limits, ask, self._world.usage(ask)):
            case Refused(error):
                raise error

    def _check_restartable(self, verb: str, record: NodeRecord) -> None:
        if record.provisioning in PREEMPTIBLE:
            raise errors.bad_request(f"{verb} is not supported for a spot or preemptible node.")
        if record.kind.hosts > 1:
            raise errors.bad_request(f"{verb} is not supported for a node of several hosts.")
        checks.check_state(verb, record.state)

    def _workers(self, record: NodeRecord, worker_ids: list[str]) -> list[int]:
        """Return the worker indices that a request means: all when it names none."""
        count = record.kind.hosts
        for worker in worker_ids:
            if not worker.isdigit() or int(worker) >= count:
                raise errors.bad_request(
                    f"Invalid worker id '{worker}': the node has workers 0 to {count - 1}."
                )
        return [int(worker) for worker in worker_ids] or list(range(count))


def guest_attributes(record: NodeRecord, worker: int) -> list[tuple[str, str, str]]:
    """Return (namespace, key, value) of what a worker published: its host key and its name."""
    found = [("hostkeys", "hostname", f"{record.node_id}-w-{worker}")]
    if worker < len(record.host_keys):
        algorithm, _, rest = record.host_keys[worker].partition(" ")
        found.append(("hostkeys", algorithm, rest.split()[0]))
    return found


def _type_message(location: Location, kind: AcceleratorType) -> Any:
    message = messages.AcceleratorType(name=location.child("acceleratorTypes", kind.name), type_=kind.name)
    message.accelerator_configs.add(type_=nodes.config_type(kind), topology=kind.topology)
    return message


def _version_message(location: Location, version: str) -> Any:
    return messages.RuntimeVersion(name=location.child("runtimeVersions", version), version=version)


def _location_message(location: Location) -> Any:
    return locations_pb2.Location(name=str(location), location_id=location.zone, display_name=location.zone)
