"""Our own dead slices: they keep using quota until they are deleted, so they go before another one is made."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from tpu.clock import Clock
from tpu.cloud import CloudError, Node, NodeState, QueuedResource, QueuedResourceState, TpuCloud
from tpu.slices.deletion import DeletionUnconfirmed, delete_slice
from tpu.slices.labels import POOL_LABEL, RUN_LABEL, is_ours

# Another run's flow that lives deletes its dead slice itself within moments; what is dead for longer has nobody.
_OTHERS_S = 5.0
_DELETE_S = 600.0

_DEAD_QUEUED = frozenset({QueuedResourceState.SUSPENDED, QueuedResourceState.FAILED})
# A spot node never comes back out of these; others can be started again by a person.
_DEAD_SPOT = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.STOPPED})


def dead_slices(nodes: Sequence[Node], queued: Sequence[QueuedResource], pool: str) -> dict[str, str | None]:
    """Names of our pool's slices that the cloud shows as dead, each with the run it was made for."""
    found = {
        one.name: one.labels.get(RUN_LABEL)
        for one in queued
        if one.state in _DEAD_QUEUED and is_ours(one.labels, pool)
    }
    for node in nodes:
        dead = node.state is NodeState.PREEMPTED or (node.spot and node.state in _DEAD_SPOT)
        if dead and is_ours(node.labels, pool):
            found[node.name] = node.labels.get(RUN_LABEL)
    return found


async def free_quota(
    cloud: TpuCloud, zone: str, labels: Mapping[str, str], clock: Clock, spared: Collection[str]
) -> list[str]:
    """Delete our pool's dead slices in a zone, and return the names of those that the cloud confirms as gone.

    `labels` are those of the slice for which quota is wanted, `spared` slices that somebody is at work on.
    """
    pool, run = labels[POOL_LABEL], labels.get(RUN_LABEL)
    found = await _look(cloud, zone, pool)
    if any(whose is None or whose != run for whose in found.values()):
        await clock.sleep(_OTHERS_S)
        again = await _look(cloud, zone, pool)
        found = {name: whose for name, whose in found.items() if name in again or whose == run}
    names = [name for name in found if name not in spared]
    gone = await asyncio.gather(*(_delete(cloud, zone, name, clock) for name in names))
    return [name for name, confirmed in zip(names, gone, strict=True) if confirmed]


async def _look(cloud: TpuCloud, zone: str, pool: str) -> dict[str, str | None]:
    try:
        nodes, queued = await asyncio.gather(cloud.list_nodes(zone), cloud.list_queued_resources(zone))
    except CloudError:
        return {}  # nothing is known to be dead
    return dead_slices(nodes, queued, pool)


async def _delete(cloud: TpuCloud, zone: str, name: str, clock: Clock) -> bool:
    try:
        await delete_slice(cloud, zone, name, clock, _DELETE_S)
    except (CloudError, DeletionUnconfirmed):
        return False
    return True
