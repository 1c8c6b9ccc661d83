"""What this project needs of a TPU provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tpu.cloud.values import HostIdentity, Node, NodeRequest, QueuedResource, QueuedResourceRequest


class TpuCloud(Protocol):
    """Every method has a deadline of its own, tries again what is safe to try again, and raises CloudError.

    Names are short ids, not resource paths. Asking for something that is not there raises CloudError of
    kind NOT_FOUND; deleting it is a success. A zone without queued resources has none to be found, listed or
    deleted; to create one there is an error of kind NO_QUEUE.
    """

    async def create_queued_resource(
        self, zone: str, name: str, request: QueuedResourceRequest
    ) -> QueuedResource:
        """Ask for a queued resource; returns when the cloud has accepted it, not when it is there.

        A name that exists is a success if it was made for the same intent, else an error of kind CONFLICT.
        """
        ...

    async def get_queued_resource(self, zone: str, name: str) -> QueuedResource: ...

    async def list_queued_resources(self, zone: str) -> list[QueuedResource]: ...

    async def delete_queued_resource(self, zone: str, name: str) -> None:
        """Ask for the deletion, its node included; returns when accepted. It is gone when `get` says so."""
        ...

    async def create_node(self, zone: str, name: str, request: NodeRequest, deadline_s: float) -> Node:
        """Make a plain node, and wait up to `deadline_s` until the cloud says that it is made."""
        ...

    async def get_node(self, zone: str, name: str) -> Node: ...

    async def list_nodes(self, zone: str) -> list[Node]: ...

    async def delete_node(self, zone: str, name: str) -> None:
        """Ask for the deletion; returns when accepted. It is gone when `get` says so."""
        ...

    async def update_metadata(self, zone: str, node: str, changes: Mapping[str, str | None]) -> None:
        """Set metadata keys of a node (None removes one); the others stay as they are."""
        ...

    async def add_ssh_keys(self, zone: str, node: str, lines: Sequence[str]) -> None:
        """Let these keys ("user:ssh-ed25519 AAAA… comment") log in, beside those that may already."""
        ...

    async def host_identities(
        self, zone: str, node: str, workers: int | None = None
    ) -> dict[int, HostIdentity]:
        """SSH host key and name by worker index, of those workers that have published a key.

        `workers` is the node's number of hosts; it is looked up if None.
        """
        ...

    async def accelerator_types(self, zone: str) -> tuple[str, ...]: ...

    async def runtime_versions(self, zone: str) -> tuple[str, ...]: ...
