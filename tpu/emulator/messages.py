"""The protobuf classes of Cloud TPU v2alpha1 that the emulator serves.

The client library ships proto-plus wrappers; the plain classes under them are quicker to copy and refuse
unknown fields, which is what a server wants.
"""

from __future__ import annotations

from typing import Any

from google.cloud import tpu_v2alpha1 as _types

# The classes are made at run time from descriptors, so no checker knows their fields: hence Any.
Node: Any = _types.Node.pb()
NodeState: Any = _types.Node.State
NodeHealth: Any = _types.Node.Health
QueuedResource: Any = _types.QueuedResource.pb()
QueuedState: Any = _types.QueuedResourceState.State
StateInitiator: Any = _types.QueuedResourceState.StateInitiator
OperationMetadata: Any = _types.OperationMetadata.pb()
AcceleratorType: Any = _types.AcceleratorType.pb()
AcceleratorConfigType: Any = _types.AcceleratorConfig.Type
RuntimeVersion: Any = _types.RuntimeVersion.pb()
GuestAttributes: Any = _types.GuestAttributes.pb()
ApiVersion: Any = _types.Node.ApiVersion
MaintenanceStatus: Any = _types.UpcomingMaintenance.MaintenanceStatus


def request(method: str) -> Any:
    """Return the request class of a method such as `CreateNode`."""
    return getattr(_types, f"{method}Request").pb()


def response(method: str) -> Any:
    """Return the response class of a method such as `ListNodes`."""
    return getattr(_types, f"{method}Response").pb()
