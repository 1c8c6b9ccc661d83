"""Between the client library's messages and our values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from google.cloud import tpu_v2alpha1 as api
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from tpu.cloud.errors import classify
from tpu.cloud.values import (
    INTENT_LABEL,
    Endpoint,
    Failure,
    HostIdentity,
    Node,
    NodeHealth,
    NodeRequest,
    NodeState,
    QueuedResource,
    QueuedResourceRequest,
    QueuedResourceState,
)

Value = TypeVar("Value")


def short(name: str) -> str:
    """Last part of a resource path."""
    return name.rsplit("/", 1)[-1]


def _preemptible(node: api.Node) -> bool:
    return node.scheduling_config.spot or node.scheduling_config.preemptible


def _zone(name: str) -> str:
    parts = name.split("/")
    return parts[3] if len(parts) > 3 else ""


def _seconds(timestamp: object) -> float | None:
    # proto-plus gives a datetime with nanoseconds, or None for a field that is not set.
    return timestamp.timestamp() if hasattr(timestamp, "timestamp") else None  # type: ignore[union-attr]


def node(message: api.Node) -> Node:
    """The API's node as ours."""
    return Node(
        name=short(message.name),
        zone=_zone(message.name),
        state=NodeState(int(message.state)),
        health=NodeHealth(int(message.health)),
        health_description=message.health_description,
        accelerator_type=message.accelerator_type,
        runtime_version=message.runtime_version,
        endpoints=tuple(
            Endpoint(internal=endpoint.ip_address, external=endpoint.access_config.external_ip or None)
            for endpoint in message.network_endpoints
        ),
        spot=_preemptible(message),
        reserved=message.scheduling_config.reserved,
        queued_resource=short(message.queued_resource) or None,
        uid=str(message.id) if message.id else "",
        created=_seconds(message.create_time),
        labels=dict(message.labels),
    )


def queued_resource(message: api.QueuedResource) -> QueuedResource:
    """The API's queued resource as ours."""
    specs = list(message.tpu.node_spec)
    state = QueuedResourceState(int(message.state.state))
    # It holds an error only in the state FAILED; the field reads as an empty message otherwise.
    failure = failure_of(message.state.failed_data.error) if state is QueuedResourceState.FAILED else None
    return QueuedResource(
        name=short(message.name),
        zone=_zone(message.name),
        state=state,
        accelerator_type=specs[0].node.accelerator_type if specs else "",
        node_names=tuple(spec.node_id for spec in specs if spec.node_id),
        spot="spot" in message or "best_effort" in message or any(_preemptible(s.node) for s in specs),
        failure=failure,
        by_user=message.state.state_initiator == api.QueuedResourceState.StateInitiator.USER,
        created=_seconds(message.create_time),
        labels=dict(specs[0].node.labels) if specs else {},
    )


class Remembered(Generic[Value]):
    """Converts the messages of lists, but those that the zone's last list had as well not again.

    Of thousands of slices few change from one list to the next, and to convert one takes twenty times as long as to
    see that it is the same.
    """

    def __init__(self, convert: Callable[[Any], Value]) -> None:
        self._convert = convert
        self._last: dict[str, dict[bytes, Value]] = {}

    def convert(self, zone: str, messages: Iterable[Any]) -> list[Value]:
        """The plain messages of a zone's list as our values, in its order."""
        last = self._last.get(zone, {})
        now: dict[bytes, Value] = {}
        found: list[Value] = []
        for message in messages:
            data = message.SerializeToString(deterministic=True)
            value = last.get(data)
            if value is None:
                value = self._convert(message)
            now[data] = value
            found.append(value)
        self._last[zone] = now
        return found


def host_identities(answers: Sequence[api.GuestAttributes], workers: int) -> dict[int, HostIdentity]:
    """Host key and name by worker, of the answer to a question about workers 0 to `workers` - 1."""
    if len(answers) != workers:
        return {}  # only its place tells which worker an answer is of: a partial list says nothing
    found: dict[int, HostIdentity] = {}
    for index, attributes in enumerate(answers):
        values = {item.key: item.value for item in attributes.query_value.items}
        if values.get("ssh-ed25519"):
            key = f"ssh-ed25519 {values['ssh-ed25519']}"
            found[index] = HostIdentity(key=key, hostname=values.get("hostname"))
    return found


def node_message(request: NodeRequest, *, queued: bool) -> api.Node:
    """The node to ask for. In a queued resource it is the latter that says how it is provisioned, save for
    preemptible nodes, which only the node itself tells from spot ones.
    """
    message = api.Node(
        accelerator_type=request.accelerator_type,
        runtime_version=request.runtime_version,
        network_config=api.NetworkConfig(
            network=request.network or "",
            subnetwork=request.subnetwork or "",
            enable_external_ips=request.external_ips,
        ),
        metadata=dict(request.metadata),
        labels={**request.labels, INTENT_LABEL: request.intent},
    )
    if request.service_account:
        message.service_account = api.ServiceAccount(
            email=request.service_account, scope=["https://www.googleapis.com/auth/cloud-platform"]
        )
    if request.provisioning == "preemptible":
        message.scheduling_config = api.SchedulingConfig(preemptible=True)
    elif not queued and request.provisioning != "on-demand":
        message.scheduling_config = api.SchedulingConfig(
            spot=request.provisioning == "spot", reserved=request.provisioning == "reserved"
        )
    return message


def queued_resource_message(parent: str, name: str, request: QueuedResourceRequest) -> api.QueuedResource:
    """The queued resource to ask for, with one node of the same name."""
    spec = api.QueuedResource.Tpu.NodeSpec(
        parent=parent, node_id=name, node=node_message(request.node, queued=True)
    )
    message = api.QueuedResource(tpu=api.QueuedResource.Tpu(node_spec=[spec]))
    if request.node.provisioning == "spot":
        message.spot = api.QueuedResource.Spot()
    elif request.node.provisioning == "preemptible":
        message.best_effort = api.QueuedResource.BestEffort()
    elif request.node.provisioning == "reserved":
        message.guaranteed = api.QueuedResource.Guaranteed(reserved=True)
    return message


def flex_start_json(message: api.QueuedResource, request: NodeRequest) -> dict[str, object]:
    """The JSON of a flex-start queued resource, which the library's message has no fields for."""
    return {
        **json_format.MessageToDict(api.QueuedResource.pb(message)),
        "provisioningModel": "FLEX_START",
        "runDuration": {"maxRunDuration": f"{request.max_run_s:.9g}s"},
    }


def failure_of(status: status_pb2.Status) -> Failure:
    """An rpc status as a failure of known kind."""
    kind = classify(status.code, status.message, detail_texts(status.details))
    return Failure(kind=kind, code=status.code, message=status.message)


def detail_texts(details: Sequence[object]) -> list[str]:
    """What the details of an error say in words: reasons, quota subjects and descriptions."""
    return [text for detail in details for text in _texts(detail)]


def _texts(detail: object) -> list[str]:
    if isinstance(detail, AnyMessage):
        for known in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.QuotaFailure,
            error_details_pb2.BadRequest,
        ):
            if detail.type_url.endswith(f"/{known.DESCRIPTOR.full_name}"):
                unpacked = known()
                detail.Unpack(unpacked)
                return _texts(unpacked)
        return []
    if isinstance(detail, error_details_pb2.ErrorInfo):
        return [detail.reason]
    if isinstance(detail, error_details_pb2.QuotaFailure):
        return [f"{violation.subject} {violation.description}" for violation in detail.violations]
    if isinstance(detail, error_details_pb2.BadRequest):
        return [f"{violation.field} {violation.description}" for violation in detail.field_violations]
    return []
