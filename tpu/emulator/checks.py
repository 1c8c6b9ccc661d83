"""Strict checks of requests: what the real API refuses, the emulator refuses in the same words."""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from tpu import topology
from tpu.emulator import errors, messages, zones
from tpu.emulator.capacity import Ask, Provisioning
from tpu.emulator.names import Location, check_id

_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
_MOST_LABELS = 64
_STARTUP_SCRIPT_BYTES = 256 * 1024
_METADATA_BYTES = 512 * 1024
_MOST_SLICES = 256
_LONGEST_FLEX_START_S = 7 * 24 * 3600.0
_PAGE_SIZE = 500
_LARGEST_PAGE = 1000

# What UpdateNode can change, and the states in which each request is served.
UPDATABLE = frozenset({"description", "labels", "metadata", "tags"})
_SERVED_IN = {
    "update": {"READY", "STOPPED"},
    "stop": {"READY"},
    "start": {"STOPPED"},
    "simulateMaintenanceEvent": {"READY"},
    "getGuestAttributes": {"READY", "RESTARTING", "REPAIRING", "STOPPING", "STARTING"},
}
# Without force a queued resource goes only when nothing of it runs or is being made.
_DELETABLE_WITHOUT_FORCE = {"CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"}


def check_location(location: Location, project: str, *, every_zone: bool = False) -> None:
    """Refuse another project than ours, and a zone that does not exist."""
    if location.project != project:
        raise errors.project_denied(location.project)
    if every_zone and location.zone == "-":
        return
    if location.zone not in zones.GENERATIONS:
        raise errors.location_denied(location.zone)


def check_state(verb: str, state: str) -> None:
    """Refuse a request that is not served while the node is in this state."""
    if state not in _SERVED_IN[verb]:
        raise errors.wrong_state(verb, state)


def check_node_deletable(state: str) -> None:
    if state == "DELETING":
        raise errors.ApiError(9, "The node is already being deleted: wait for the operation that does it.")


def check_queued_deletable(state: str, nodes: Iterable[str], *, force: bool) -> None:
    """Refuse to delete a queued resource that is being deleted, or that holds nodes and is not forced."""
    if state == "DELETING":
        raise errors.ApiError(
            9, "The queued resource is already being deleted: wait for the operation that does it."
        )
    nodes = list(nodes)
    if not force and state not in _DELETABLE_WITHOUT_FORCE and (nodes or state != "ACTIVE"):
        raise errors.ApiError(
            9,
            f"The queued resource is in state {state} and holds {', '.join(nodes) or 'nodes being made'}: "
            "delete these first, or set force.",
        )


def check_request_id(request_id: str) -> None:
    if not request_id:
        return
    try:
        uuid.UUID(request_id)
    except ValueError:
        raise errors.bad_request(f"Invalid request_id '{request_id}': it must be a UUID.") from None


def resolve_kind(node: Any, zone: str) -> topology.AcceleratorType:
    """Return what a node message asks for, by accelerator_type or by accelerator_config."""
    offered = zones.accelerator_types(zone)
    if node.HasField("accelerator_config"):
        if node.accelerator_type:
            raise errors.bad_request("Set accelerator_type or accelerator_config, not both.")
        generation = messages.AcceleratorConfigType(node.accelerator_config.type_).name.lower()
        generation = {"v5lite_pod": "v5litepod"}.get(generation, generation)
        for kind in offered.values():
            if (kind.generation, kind.topology) == (generation, node.accelerator_config.topology):
                return kind
        raise errors.type_not_offered(f"{generation} {node.accelerator_config.topology}", zone)
    if not node.accelerator_type:
        raise errors.bad_request("accelerator_type must be set.")
    if node.accelerator_type not in offered:
        raise errors.type_not_offered(node.accelerator_type, zone)
    return offered[node.accelerator_type]


def check_node(node: Any, zone: str) -> topology.AcceleratorType:
    """Check the node message of a creation and return the kind of slice it asks for."""
    kind = resolve_kind(node, zone)
    if not node.runtime_version:
        raise errors.bad_request("runtime_version must be set.")
    offered = zones.runtime_versions(zone)
    if node.runtime_version not in offered:
        raise errors.bad_request(
            f"The runtime version '{node.runtime_version}' could not be found in zone '{zone}'; "
            f"available: {', '.join(offered)}."
        )
    check_labels(node.labels)
    check_metadata(node.metadata)
    scheduling = node.scheduling_config
    if scheduling.provisioning_model == messages.provisioning_model("FLEX_START"):
        raise errors.bad_request("The FLEX_START provisioning model is supported for queued resources only.")
    if scheduling.spot + scheduling.preemptible + scheduling.reserved > 1:
        raise errors.bad_request("scheduling_config must be one of spot, preemptible and reserved.")
    return kind


def check_labels(labels: dict[str, str]) -> None:
    if len(labels) > _MOST_LABELS:
        raise errors.bad_request(f"At most {_MOST_LABELS} labels are allowed, found {len(labels)}.")
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise errors.bad_request(
                f"Invalid label '{key}={value}': keys begin with a lower-case letter; keys and values are "
                "lower-case letters, digits, - and _, at most 63 characters."
            )


def check_metadata(metadata: dict[str, str]) -> None:
    script = len(metadata.get("startup-script", "").encode())
    if script > _STARTUP_SCRIPT_BYTES:
        raise errors.bad_request(
            f"Metadata value of 'startup-script' is too large: {script} bytes, "
            f"{_STARTUP_SCRIPT_BYTES} allowed."
        )
    total = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if total > _METADATA_BYTES:
        raise errors.bad_request(f"Metadata is too large: {total} bytes, {_METADATA_BYTES} allowed.")


def node_provisioning(node: Any) -> Provisioning:
    """Return how a node's own scheduling configuration provisions."""
    scheduling = node.scheduling_config
    model = scheduling.provisioning_model
    if scheduling.spot or model == messages.provisioning_model("SPOT"):
        return "spot"
    if scheduling.preemptible:
        return "preemptible"
    reserved = scheduling.reserved or model == messages.provisioning_model("RESERVATION_BOUND")
    return "reserved" if reserved else "on-demand"


def queued_provisioning(queued: Any) -> Provisioning:
    """Return how the tier of a queued resource provisions; without one its model says it, or its node."""
    if queued.provisioning_model == messages.provisioning_model("FLEX_START"):
        return "flex-start"
    match queued.WhichOneof("tier"):
        case "spot":
            return "spot"
        case "best_effort":
            return "preemptible"
        case "guaranteed":
            return "reserved" if queued.guaranteed.reserved else "on-demand"
    if queued.provisioning_model == messages.provisioning_model("SPOT"):
        return "spot"
    if queued.provisioning_model == messages.provisioning_model("RESERVATION_BOUND"):
        return "reserved"
    return node_provisioning(queued.tpu.node_spec[0].node)


def max_run_s(queued: Any) -> float | None:
    """Return how long the nodes of a flex-start queued resource may run, in seconds; None for any other."""
    flex_start = queued_provisioning(queued) == "flex-start"
    if not flex_start:
        if queued.HasField("run_duration"):
            raise errors.bad_request("run_duration is supported for the FLEX_START provisioning model only.")
        return None
    if queued.WhichOneof("tier"):
        raise errors.bad_request("The FLEX_START provisioning model cannot be combined with a tier.")
    seconds = queued.run_duration.max_run_duration.ToNanoseconds() / 1e9
    if not 0 < seconds <= _LONGEST_FLEX_START_S:
        raise errors.bad_request(
            "run_duration.max_run_duration must be set for FLEX_START, above 0 and at most 7 days, "
            f"found {seconds:g} s."
        )
    return seconds


def check_queued(queued: Any, location: Location) -> tuple[Ask, tuple[str, ...]]:
    """Check a queued resource and return what it asks for and the ids of the nodes it will make."""
    specs = list(queued.tpu.node_spec)
    if len(specs) != 1:
        raise errors.bad_request(f"tpu.node_spec must have exactly one entry, found {len(specs)}.")
    spec = specs[0]
    if spec.parent and spec.parent != str(location):
        raise errors.bad_request(f"node_spec.parent '{spec.parent}' differs from the parent '{location}'.")
    kind = check_node(spec.node, location.zone)
    if queued.WhichOneof("tier") and node_provisioning(spec.node) not in (
        "on-demand",
        queued_provisioning(queued),
    ):
        raise errors.bad_request("node.scheduling_config contradicts the tier of the queued resource.")
    if spec.HasField("multi_node_params"):
        if spec.node_id:
            raise errors.bad_request("Set node_id or multi_node_params, not both.")
        count, prefix = spec.multi_node_params.node_count, spec.multi_node_params.node_id_prefix
        if not 2 <= count <= _MOST_SLICES:
            raise errors.bad_request(
                f"multi_node_params.node_count must be from 2 to {_MOST_SLICES}, found {count}."
            )
        if not prefix:
            raise errors.bad_request("multi_node_params.node_id_prefix must be set.")
        ids = tuple(f"{prefix}-{i}" for i in range(count))
    else:
        ids = (spec.node_id,)
    for node_id in ids:
        check_id("node_id", node_id)
    return Ask(location.zone, kind, queued_provisioning(queued), len(ids), max_run_s(queued)), ids


def page(names: Sequence[str], page_size: int, page_token: str) -> tuple[list[str], str]:
    """Return one page of names, which come sorted, and the token of the next, which is empty on the last.

    A token is the last name given, so that things made or deleted meanwhile move no page.
    """
    if page_size < 0:
        raise errors.bad_request(f"page_size must not be negative, found {page_size}.")
    after = ""
    if page_token:
        try:
            after = bytes.fromhex(page_token).decode()
        except ValueError:
            raise errors.bad_request(f"Invalid page_token '{page_token}'.") from None
    size = min(page_size or _PAGE_SIZE, _LARGEST_PAGE)
    begin = bisect_right(names, after)
    shown = list(names[begin : begin + size])
    return shown, shown[-1].encode().hex() if len(names) > begin + size else ""
