"""Where the hosts of a node are reached, and by which keys they are known."""

from __future__ import annotations

from collections.abc import Mapping

from tpu.cloud import HostIdentity, Node, TpuCloud
from tpu.hosts.address import HostAddress


async def host_addresses(cloud: TpuCloud, zone: str, node: Node) -> tuple[HostAddress, ...]:
    """Addresses of a node's hosts in worker order; `host_key` is None of those that have published none.

    Raises:
        CloudError: the cloud could not be asked, or the node is in no state to answer.
    """
    identities = await cloud.host_identities(zone, node.name, workers=len(node.endpoints))
    return joined(zone, node, identities)


def joined(zone: str, node: Node, identities: Mapping[int, HostIdentity]) -> tuple[HostAddress, ...]:
    """A node's endpoints with what its workers have published."""
    found = []
    for index, endpoint in enumerate(node.endpoints):
        identity = identities.get(index)
        found.append(
            HostAddress(
                slice=node.name,
                index=index,
                internal=endpoint.internal,
                external=endpoint.external,
                host_key=identity.key if identity else None,
                zone=zone,
                hostname=identity.hostname if identity else None,
            )
        )
    return tuple(found)
