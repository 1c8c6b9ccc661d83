"""Be rid of a slice: deleted is what the cloud knows no more, not what was asked to go."""

from __future__ import annotations

from tpu.clock import Clock
from tpu.cloud import CloudError, ErrorKind, NodeState, QueuedResourceState, TpuCloud
from tpu.slices.condition import Look, take_look

_FIRST_LOOK_S, _LONGEST_LOOK_S, _LOOK_GROWTH = 0.05, 10.0, 1.6
# A deletion that the cloud has begun may be forgotten by it: it is asked again after so long.
SEND_AGAIN_S = 60.0


class DeletionUnconfirmed(Exception):
    """The cloud has not said within the deadline that a slice is gone: it may still cost money."""


async def delete_slice(
    cloud: TpuCloud, zone: str, name: str, clock: Clock, deadline_s: float, *, settle_s: float = 0.0
) -> None:
    """Delete a slice, and return when the cloud answers NOT_FOUND for queued resource and node.

    A slice that is not there is a success. `settle_s` is how long it must stay unknown: a creation whose
    answer was lost can arrive late.

    Raises:
        CloudError: of kind PERMISSION; nothing else ends the attempt before the deadline.
        DeletionUnconfirmed: not confirmed within `deadline_s`.
    """
    end = clock.monotonic() + deadline_s
    pause = _FIRST_LOOK_S
    gone_since: float | None = None
    sent_at: float | None = None
    told = "nothing"
    while True:
        try:
            if sent_at is None:
                await cloud.delete_queued_resource(zone, name)
                sent_at = clock.monotonic()
            look = await take_look(cloud, zone, name, spot=False, was_ready=True)
            now = clock.monotonic()
            if look.queued_resource is None and look.node is None:
                gone_since = now if gone_since is None else gone_since
                if now - gone_since >= settle_s:
                    return
                told = "it is gone, but a late creation may arrive"
            else:
                gone_since = None
                told = _state_of(look)
                if not going(look) or now - sent_at >= SEND_AGAIN_S:
                    await send_deletion(cloud, zone, name, look)
                    sent_at = clock.monotonic()
        except CloudError as error:
            if error.kind is ErrorKind.PERMISSION:
                raise
            # Unreachable, or refused in its present state: only the deadline ends trying.
            told = str(error)
        now = clock.monotonic()
        if now >= end:
            raise DeletionUnconfirmed(
                f"the deletion of {name} in {zone} is not confirmed after {deadline_s:g} s (last: {told}); it "
                "may still cost money: delete it again, or let the reaper do so"
            )
        await clock.sleep(min(pause, end - now))
        pause = min(pause * _LOOK_GROWTH, _LONGEST_LOOK_S)


async def send_deletion(cloud: TpuCloud, zone: str, name: str, look: Look) -> None:
    """Ask once for the deletion of what a look has found.

    Raises:
        CloudError: it was refused, or the cloud does not answer.
    """
    if look.queued_resource is not None:
        await cloud.delete_queued_resource(zone, name)
    else:
        await cloud.delete_node(zone, name)  # its queued resource went without it, or it never had one


def going(look: Look) -> bool:
    """True if the cloud says that the deletion is under way."""
    if look.queued_resource is not None:
        return look.queued_resource.state is QueuedResourceState.DELETING
    return look.node is not None and look.node.state is NodeState.DELETING


def _state_of(look: Look) -> str:
    parts = []
    if look.queued_resource is not None:
        parts.append(f"the queued resource is {look.queued_resource.state.name}")
    if look.node is not None:
        parts.append(f"the node is {look.node.state.name}")
    return ", ".join(parts)
