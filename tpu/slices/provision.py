"""Get a slice. The I/O around `condition`: every wait has a deadline and says what it waits for.

A slice is a queued resource with one node of the same name, or in a zone without queued resources the node alone.
In whatever way a provisioning ends other than well, what it may have made is deleted, and deleted means that the
cloud knows it no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tpu.clock import Clock
from tpu.cloud import (
    CloudError,
    ErrorKind,
    Node,
    QueuedResourceRequest,
    QueuedResourceState,
    TpuCloud,
)
from tpu.hosts.address import HostAddress
from tpu.slices.condition import Condition, LifeView, Look, take_look, view
from tpu.slices.deletion import DeletionUnconfirmed, delete_slice
from tpu.slices.hosts import host_addresses
from tpu.slices.intent import node_request
from tpu.slices.request import SliceRequest
from tpu.topology import accelerator_type
from tpu.unbroken import unbroken

# Pauses between two looks, in seconds. They begin short, for clouds that are quick, and grow to what is kind
# to the API's read quota when a slice takes its time.
_FIRST_LOOK_S, _LONGEST_LOOK_S, _LOOK_GROWTH = 0.05, 10.0, 1.6
# Whether we still may act is read from an object of the bucket: not at every look.
_ASK_AGAIN_S = 10.0
# The node of an active queued resource shows within moments; if it does not, it has been taken away.
_NODE_SHOWS_S = 60.0
# Hosts publish their SSH keys while they boot; an image that never does so must not hold us for ever.
_HOST_KEYS_S = 300.0
_IN_QUEUE = frozenset(
    {
        QueuedResourceState.CREATING,
        QueuedResourceState.ACCEPTED,
        QueuedResourceState.WAITING_FOR_RESOURCES,
    }
)
# How long the deletion of an unfinished creation may take before it is left to the reaper.
_GIVE_UP_S = 900.0
# A creation whose answer was lost can still arrive after a look that saw nothing.
_SETTLE_S = 3.0

# These answers to a creation do not say what it made, or whether it still will.
_ANSWER_LOST = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.UNKNOWN, ErrorKind.CANCELLED})
# After these something may have been made. After any other refusal nothing was.
_MAYBE_MADE = _ANSWER_LOST | {ErrorKind.PREEMPTED, ErrorKind.WRONG_STATE}


class NotReady(CloudError):
    """No slice was ready within the request's deadline. The user's patience is over, so nobody asks again."""

    def __init__(self, message: str, wanted: str) -> None:
        super().__init__(ErrorKind.TIMED_OUT, 0, message, wanted=wanted)

    @property
    def retryable(self) -> bool:
        return False


class NoLongerWanted(Exception):
    """Raised by `still_wanted` when a slice in creation is to be given up and deleted.

    Any other exception of `still_wanted` means that the right to act is lost: all is left as it is.
    """


@dataclass(frozen=True)
class ReadySlice:
    """A slice whose queued resource is ACTIVE and whose node is READY; `hosts` are in worker order."""

    name: str
    zone: str
    node: Node
    request: SliceRequest
    hosts: tuple[HostAddress, ...]


async def provision(
    cloud: TpuCloud,
    request: SliceRequest,
    name: str,
    clock: Clock,
    report: Callable[[str], None],
    still_wanted: Callable[[], Awaitable[None]],
    *,
    keep: bool = False,
    find_only: bool = False,
    queue_patience_s: float | None = None,
    waits_for: Callable[[str], object] | None = None,
) -> ReadySlice:
    """Make the slice `name`, or find it if it was made for this request before, and wait until it is ready.

    The intent must be written down under `name` before. On cancellation the creation in flight is deleted,
    and the call returns only when the cloud has confirmed that. If a deletion cannot be confirmed, the error
    carries a note that names what may be left.

    `keep` is for taking up a slice on which a gang may be running: nothing is deleted then, whatever
    happens, since a cloud that does not answer is no reason to end a gang. With `find_only` nothing is made
    either: it is for a slice that somebody else has made.

    `queue_patience_s` is how long it may wait for capacity in the zone's queue, for those who have another zone to
    go to; once capacity is found only the request's own deadline counts. `waits_for` is told, whenever it changes,
    what the slice waits for.

    Raises:
        CloudError: refused, failed, or preempted while being made; its kind says which. STOCKOUT, too, when the
            patience in the queue is over.
        NotReady: not ready within `request.deadline_s`.
    """
    await still_wanted()
    creation = _Creation(cloud, request, name, clock, report, still_wanted, queue_patience_s, waits_for)
    if not find_only:
        report(f"asking for {creation.wanted}")
    try:
        if not find_only:
            await creation.send()
        node = await creation.until_ready()
        hosts = await creation.until_host_keys(node)
        await creation.let_us_in()
    except (CloudError, asyncio.CancelledError, NoLongerWanted) as error:
        if creation.maybe_made and not keep:
            await creation.give_up(error)
        raise
    finally:
        creation.listen_no_more()
    report(f"{creation.wanted} is ready")
    return ReadySlice(name, request.zone, node, request, hosts)


async def check_offered(cloud: TpuCloud, request: SliceRequest) -> None:
    """Look whether the zone has the accelerator type and the image, before anything is made.

    Raises:
        CloudError: NOT_OFFERED, with what the zone has; PERMISSION for a wrong zone or missing rights.
    """
    wanted = f"use {request.accelerator_type} with image {request.image} in {request.zone}"
    types, images = await asyncio.gather(
        cloud.accelerator_types(request.zone), cloud.runtime_versions(request.zone)
    )
    for what, asked, offered in (
        ("accelerator type", request.accelerator_type, types),
        ("image", request.image, images),
    ):
        if asked not in offered:
            message = f"{request.zone} has no {what} {asked}; it has {', '.join(offered) or 'none'}"
            raise CloudError(ErrorKind.NOT_OFFERED, 0, message, wanted=wanted)


class _Creation:
    """One creation, from sending the request until it is ready or given up."""

    def __init__(
        self,
        cloud: TpuCloud,
        request: SliceRequest,
        name: str,
        clock: Clock,
        report: Callable[[str], None],
        still_wanted: Callable[[], Awaitable[None]],
        queue_patience_s: float | None,
        waits_for: Callable[[str], object] | None,
    ) -> None:
        self.wanted = f"{request.provisioning} {request.accelerator_type} {name} in {request.zone}"
        self.maybe_made = False
        self._answer_lost = False
        self._cloud = cloud
        self._request = request
        self._name = name
        self._clock = clock
        self._report = report
        self._still_wanted = still_wanted
        self._waits_for = waits_for or (lambda reason: None)
        self._queue_end = math.inf if queue_patience_s is None else clock.monotonic() + queue_patience_s
        self._queue_patience_s = queue_patience_s
        self._plain: asyncio.Task[Node] | None = None  # the creation of a node without a queued resource
        self._end = clock.monotonic() + request.deadline_s
        self._asked = clock.monotonic()
        self._said = ""

    async def send(self) -> None:
        """Send the request. It is not broken off by a cancellation: we would not know what it made."""
        request = self._request
        node = node_request(self._name, request)
        self.maybe_made = True
        try:
            await unbroken(
                self._cloud.create_queued_resource(request.zone, self._name, QueuedResourceRequest(node))
            )
        except CloudError as error:
            if error.kind is not ErrorKind.NO_QUEUE:
                self._refused(error)
                raise
            # Its call lasts until the node is made, so it goes on beside our looks.
            self._plain = asyncio.ensure_future(
                self._cloud.create_node(
                    request.zone, self._name, node, max(1.0, self._end - self._clock.monotonic())
                )
            )

    def _refused(self, error: CloudError) -> None:
        self.maybe_made = error.in_operation or error.kind in _MAYBE_MADE
        self._answer_lost = error.kind in _ANSWER_LOST and not error.in_operation

    def listen_no_more(self) -> None:
        """Wait no longer for the answer to the creation of a plain node."""
        if self._plain is None:
            return
        if self._plain.cancel():
            self._answer_lost = True  # it may have been sent a moment ago
        elif not self._plain.cancelled():
            self._plain.exception()  # the looks have told the same

    async def until_ready(self) -> Node:
        """Wait until queued resource and node are ready, with all hosts' addresses."""
        hosts = accelerator_type(self._request.accelerator_type).hosts
        pause = _FIRST_LOOK_S
        missing_since: float | None = None
        while True:
            coming = self._plain_coming()
            look, seen = await self._look(was_ready=False)
            if coming and look is not None and seen.gone:
                seen = LifeView(Condition.COMING, "the cloud is taking the request in")
            if look is not None and seen.usable and look.node is not None:
                if len(look.node.endpoints) >= hosts:
                    return look.node
                count = len(look.node.endpoints)
                seen = LifeView(Condition.COMING, f"{count} of {hosts} hosts have an address")
            if look is not None and seen.lost:
                raise self._loss(look, seen)
            missing_since = self._node_missing(look, missing_since)
            self._lose_patience(look)
            await self._wait(seen.reason, pause)
            pause = min(pause * _LOOK_GROWTH, _LONGEST_LOOK_S)

    def _plain_coming(self) -> bool:
        """True while the creation of a plain node is under way.

        Raises:
            CloudError: it has failed.
        """
        if self._plain is None or not self._plain.done():
            return self._plain is not None
        try:
            self._plain.result()
        except CloudError as error:
            self._refused(error)
            raise
        return False

    def _lose_patience(self, look: Look | None) -> None:
        """Raises CloudError of kind STOCKOUT if the slice has waited in the queue for as long as it may."""
        queued = look.queued_resource if look is not None else None
        if queued is None or queued.state not in _IN_QUEUE or self._clock.monotonic() < self._queue_end:
            return
        message = f"no capacity within {self._queue_patience_s:g} s in the zone's queue"
        raise CloudError(ErrorKind.STOCKOUT, 0, message, wanted=self.wanted, in_operation=True)

    async def until_host_keys(self, node: Node) -> tuple[HostAddress, ...]:
        """Wait until every host has published its SSH key, so that none is trusted unseen.

        Raises:
            CloudError: the slice was lost meanwhile, or TIMED_OUT: another slice may do better.
        """
        end = min(self._end, self._clock.monotonic() + _HOST_KEYS_S)
        pause = _FIRST_LOOK_S
        while True:
            try:
                hosts = await host_addresses(self._cloud, self._request.zone, node)
                missing = [str(host.index) for host in hosts if host.host_key is None]
                reason = f"no SSH host key yet of host {', '.join(missing)}"
            except CloudError as error:
                hosts, missing, reason = (), ["all"], str(error)
            if not missing:
                return hosts
            look, seen = await self._look(was_ready=True)
            if look is not None and seen.lost:
                raise self._loss(look, seen)
            if self._clock.monotonic() >= end:
                raise CloudError(ErrorKind.TIMED_OUT, 0, reason, wanted=self.wanted)
            await self._wait(reason, pause)
            pause = min(pause * _LOOK_GROWTH, _LONGEST_LOOK_S)

    async def let_us_in(self) -> None:
        """Put our SSH keys on a slice that an earlier life of ours made, maybe on another machine."""
        keys = self._request.metadata.get("ssh-keys")
        if keys:
            await self._cloud.add_ssh_keys(self._request.zone, self._name, keys.splitlines())

    async def give_up(self, cause: BaseException) -> None:
        """Delete what may have been made, and return when it is gone. No second cancellation breaks it off.

        Raises:
            Exception: what `still_wanted` says if the right to act is lost; nothing is deleted then.
        """

        self.listen_no_more()

        async def delete() -> None:
            with contextlib.suppress(NoLongerWanted):  # that would be why we delete
                await self._still_wanted()
            self._report(f"deleting {self.wanted}: {str(cause) or 'cancelled'}")
            try:
                await delete_slice(
                    self._cloud,
                    self._request.zone,
                    self._name,
                    self._clock,
                    _GIVE_UP_S,
                    settle_s=_SETTLE_S if self._answer_lost else 0.0,
                )
            except (DeletionUnconfirmed, CloudError) as error:
                self._report(str(error))
                cause.add_note(str(error))

        await unbroken(delete())

    async def _look(self, was_ready: bool) -> tuple[Look | None, LifeView]:
        try:
            look = await take_look(
                self._cloud,
                self._request.zone,
                self._name,
                spot=self._request.spot,
                was_ready=was_ready,
            )
        except CloudError as error:
            return None, LifeView(Condition.UNKNOWN, str(error))
        return look, view(look)

    async def _wait(self, reason: str, pause: float) -> None:
        if reason != self._said:
            self._report(f"{self.wanted}: {reason}")
            self._waits_for(reason)
            self._said = reason
        now = self._clock.monotonic()
        if now >= self._end:
            message = f"not ready within {self._request.deadline_s:g} s; the last that was seen: {reason}"
            raise NotReady(message, self.wanted)
        if now - self._asked >= _ASK_AGAIN_S:
            await self._still_wanted()
            self._asked = now
        left_in_queue = max(self._queue_end - now, _FIRST_LOOK_S)
        await self._clock.sleep(min(pause, self._end - now, left_in_queue))

    def _node_missing(self, look: Look | None, since: float | None) -> float | None:
        """Since when an active queued resource shows no node; raises when that is too long."""
        queued = look.queued_resource if look is not None else None
        if look is None:
            return since
        if queued is None or queued.state is not QueuedResourceState.ACTIVE or look.node is not None:
            return None
        now = self._clock.monotonic()
        if since is not None and now - since >= _NODE_SHOWS_S:
            raise self._loss(look, LifeView(Condition.LOST, "its node is gone", preempted=look.spot))
        return now if since is None else since

    def _loss(self, look: Look, seen: LifeView) -> CloudError:
        """What to tell of a slice that was lost before it was ready."""
        failure = look.queued_resource.failure if look.queued_resource is not None else None
        if failure is not None:
            return CloudError(
                failure.kind, failure.code, failure.message, wanted=self.wanted, in_operation=True
            )
        by_user = look.queued_resource is not None and look.queued_resource.by_user
        if seen.gone or (by_user and not seen.preempted):
            kind = ErrorKind.DELETED
        elif seen.preempted:
            kind = ErrorKind.PREEMPTED
        else:
            kind = ErrorKind.INTERNAL
        return CloudError(kind, 0, seen.reason, wanted=self.wanted, in_operation=True)
