"""The protobuf classes of Cloud TPU v2alpha1 that the emulator serves.

The client library ships proto-plus wrappers; the plain classes under them are quicker to copy and refuse
unknown fields, which is what a server wants. They are made anew here, in a pool of their own, with the fields
that the API has today and the library lacks: how a resource is provisioned, and how long it may run.
"""

from __future__ import annotations

from typing import Any

from google.cloud import tpu_v2alpha1 as _types
from google.protobuf import descriptor_pb2, duration_pb2, empty_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as _Field
from google.protobuf.descriptor_pool import DescriptorPool

PACKAGE = "google.cloud.tpu.v2alpha1"

# The real numbers are not public. A gRPC client skips these fields as unknown ones; in JSON only names count.
_FIRST_NUMBER = 10_001
_MODELS = ("PROVISIONING_MODEL_UNSPECIFIED", "STANDARD", "SPOT", "RESERVATION_BOUND", "FLEX_START")


def _extended_pool() -> DescriptorPool:
    """Return a pool with the library's v2alpha1 and the fields that it lacks."""
    pool = DescriptorPool()
    source = _types.Node.pb().DESCRIPTOR.file
    added: set[str] = set()

    def add(file: Any) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        if file is source:
            _extend(proto)
        pool.AddSerializedFile(proto.SerializeToString())

    for file in (duration_pb2.DESCRIPTOR, timestamp_pb2.DESCRIPTOR, empty_pb2.DESCRIPTOR, source):
        add(file)
    return pool


def _extend(file: descriptor_pb2.FileDescriptorProto) -> None:
    messages = {message.name: message for message in file.message_type}
    duration, timestamp = ".google.protobuf.Duration", ".google.protobuf.Timestamp"

    models = file.enum_type.add(name="ProvisioningModel")
    for number, name in enumerate(_MODELS):
        models.value.add(name=name, number=number)
    run = file.message_type.add(name="RunDuration")
    _add_field(run, 1, "max_run_duration", duration)
    _add_field(run, 2, "termination_time", timestamp)

    model = f".{PACKAGE}.ProvisioningModel"
    queued, scheduling = messages["QueuedResource"], messages["SchedulingConfig"]
    _add_field(queued, _FIRST_NUMBER, "provisioning_model", model, _Field.TYPE_ENUM)
    _add_field(queued, _FIRST_NUMBER + 1, "run_duration", f".{PACKAGE}.RunDuration")
    _add_field(scheduling, _FIRST_NUMBER, "provisioning_model", model, _Field.TYPE_ENUM)
    _add_field(scheduling, _FIRST_NUMBER + 1, "termination_timestamp", timestamp)


def _add_field(
    message: descriptor_pb2.DescriptorProto,
    number: int,
    name: str,
    type_name: str,
    kind: _Field.Type.ValueType = _Field.TYPE_MESSAGE,
) -> None:
    message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL, type=kind, type_name=type_name)


POOL = _extended_pool()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


# The classes are made at run time from descriptors, so no checker knows their fields: hence Any.
Node: Any = _class("Node")
NodeState: Any = _types.Node.State
NodeHealth: Any = _types.Node.Health
QueuedResource: Any = _class("QueuedResource")
QueuedState: Any = _types.QueuedResourceState.State
StateInitiator: Any = _types.QueuedResourceState.StateInitiator
OperationMetadata: Any = _class("OperationMetadata")
AcceleratorType: Any = _class("AcceleratorType")
AcceleratorConfigType: Any = _types.AcceleratorConfig.Type
RuntimeVersion: Any = _class("RuntimeVersion")
GuestAttributes: Any = _class("GuestAttributes")
ApiVersion: Any = _types.Node.ApiVersion
MaintenanceStatus: Any = _types.UpcomingMaintenance.MaintenanceStatus


def provisioning_model(name: str) -> int:
    """Return the number of a provisioning model such as `FLEX_START`."""
    return _MODELS.index(name)


def request(method: str) -> Any:
    """Return the request class of a method such as `CreateNode`."""
    return _class(f"{method}Request")


def response(method: str) -> Any:
    """Return the response class of a method such as `ListNodes`."""
    return _class(f"{method}Response")
