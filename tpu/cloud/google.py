"""Google's Cloud TPU API (v2alpha1), or any server that speaks it. The one user of google-cloud-tpu."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.auth.exceptions import DefaultCredentialsError
from google.cloud import tpu_v2alpha1 as api
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport
from google.longrunning import operations_pb2

from tpu.clock import Clock, SystemClock
from tpu.cloud import calls, convert
from tpu.cloud.errors import CloudError, ErrorKind
from tpu.cloud.rest import RestApi, no_credentials
from tpu.cloud.values import (
    INTENT_LABEL,
    HostIdentity,
    Node,
    NodeRequest,
    NodeState,
    QueuedResource,
    QueuedResourceRequest,
    QueuedResourceState,
)
from tpu.connection import Connection

# A queued resource is accepted, and metadata set, within seconds; longer than this is not waited for.
_SHORT_OPERATION_S = 60.0

# A channel that lost its server looks for it again this often, instead of at Google's default of 2 minutes.
_CHANNEL_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]


@asynccontextmanager
async def open_cloud(
    connection: Connection,
    clock: Clock | None = None,
    policy: calls.CallPolicy | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[GoogleTpuCloud]:
    """The cloud of a connection, for use in the running event loop only.

    `report` hears when it has not answered for some seconds, and when it does again.

    With `connection.api_endpoint` it is a plain-text server that wants the key as a bearer token; without,
    Google's own, by TLS and the default credentials.

    Raises:
        CloudError: of kind PERMISSION, if there are no default credentials.
    """
    metadata: tuple[tuple[str, str], ...] = ()
    if connection.api_endpoint:
        channel = grpc.aio.insecure_channel(connection.api_endpoint, options=_CHANNEL_OPTIONS)
        client = api.TpuAsyncClient(transport=TpuGrpcAsyncIOTransport(channel=channel))
        if connection.api_key:
            metadata = (("authorization", f"Bearer {connection.api_key}"),)
    else:
        client = _google_client()
    opened: list[RestApi] = []

    def rest() -> RestApi:
        opened.extend([] if opened else [RestApi(connection)])
        return opened[0]

    try:
        yield GoogleTpuCloud(
            client,
            connection.project,
            metadata,
            clock or SystemClock(),
            policy or calls.CallPolicy(),
            rest,
            report,
        )
    finally:
        await client.transport.close()
        for each in opened:
            each.close()


def _google_client() -> api.TpuAsyncClient:
    try:
        return api.TpuAsyncClient()
    except DefaultCredentialsError as error:
        raise no_credentials() from error


class GoogleTpuCloud:
    """TpuCloud by google-cloud-tpu v2alpha1. Belongs to the event loop that made it."""

    def __init__(
        self,
        client: api.TpuAsyncClient,
        project: str,
        metadata: tuple[tuple[str, str], ...],
        clock: Clock,
        policy: calls.CallPolicy,
        rest: Callable[[], RestApi] | None = None,
        report: Callable[[str], None] = lambda _: None,
        chance: random.Random | None = None,
    ) -> None:
        """`rest` opens the REST form of the API, which flex-start alone needs. `chance` draws pauses between tries."""
        self._client = client
        self._rest = rest
        self._project = project
        self._metadata = metadata
        self._clock = clock
        self._policy = policy
        self._report = report
        self._chance = chance or random.Random()
        self._silent = False
        self._known_nodes = convert.Remembered(lambda message: convert.node(api.Node.wrap(message)))
        self._known_queued = convert.Remembered(
            lambda message: convert.queued_resource(api.QueuedResource.wrap(message))
        )

    async def create_queued_resource(
        self, zone: str, name: str, request: QueuedResourceRequest
    ) -> QueuedResource:
        parent = self._parent(zone)
        wanted = f"create {request.node.provisioning} {request.node.accelerator_type} {name!r} in {zone}"
        message = api.CreateQueuedResourceRequest(
            parent=parent,
            queued_resource_id=name,
            queued_resource=convert.queued_resource_message(parent, name, request),
        )
        try:
            if request.node.provisioning == "flex-start":
                operation = await self._create_flex_start(message, request.node, wanted)
            else:
                future = await self._call(
                    self._client.create_queued_resource, message, wanted=wanted, retry_on=calls.CREATE
                )
                operation = future.operation
        except CloudError as error:
            if error.kind is not ErrorKind.ALREADY_EXISTS:
                raise
            existing = await self.get_queued_resource(zone, name)
            _check_intent(existing.labels, request.node.intent, wanted, error)
            return existing
        await self._finish(operation, wanted, _SHORT_OPERATION_S)
        return await self.get_queued_resource(zone, name)

    async def _create_flex_start(
        self, message: api.CreateQueuedResourceRequest, request: NodeRequest, wanted: str
    ) -> operations_pb2.Operation:
        if self._rest is None:
            raise CloudError(ErrorKind.BAD_REQUEST, 3, "this cloud has no REST form", wanted=wanted)
        rest = self._rest()
        path = f"{message.parent}/queuedResources"
        query = {"queuedResourceId": message.queued_resource_id}
        body = convert.flex_start_json(message.queued_resource, request)
        answer = await calls.call(
            lambda timeout_s: rest.post(path, query, body, timeout_s),
            wanted=wanted,
            retry_on=calls.CREATE,
            policy=self._policy,
            clock=self._clock,
            chance=self._chance,
        )
        return operations_pb2.Operation(name=answer["name"])

    async def get_queued_resource(self, zone: str, name: str) -> QueuedResource:
        wanted = f"look at queued resource {name!r} in {zone}"
        try:
            message = await self._call(
                self._client.get_queued_resource,
                api.GetQueuedResourceRequest(name=self._queued_resource(zone, name)),
                wanted=wanted,
            )
        except CloudError as error:
            if error.kind is not ErrorKind.NO_QUEUE:
                raise
            raise CloudError(ErrorKind.NOT_FOUND, error.code, error.message, wanted=wanted) from error
        return convert.queued_resource(message)

    async def list_queued_resources(self, zone: str) -> list[QueuedResource]:
        request = api.ListQueuedResourcesRequest(parent=self._parent(zone), page_size=self._policy.page_size)
        pages = self._pages(self._client.list_queued_resources, request, f"list queued resources in {zone}")
        try:
            parts = [page.queued_resources.pb async for page in pages]
        except CloudError as error:
            if error.kind is ErrorKind.NO_QUEUE:
                return []
            raise
        return self._known_queued.convert(zone, itertools.chain.from_iterable(parts))

    async def delete_queued_resource(self, zone: str, name: str) -> None:
        request = api.DeleteQueuedResourceRequest(name=self._queued_resource(zone, name), force=True)

        async def deleting() -> bool:
            return (await self.get_queued_resource(zone, name)).state is QueuedResourceState.DELETING

        wanted = f"delete queued resource {name!r} in {zone}"
        await self._delete(self._client.delete_queued_resource, request, wanted, deleting)

    async def create_node(self, zone: str, name: str, request: NodeRequest, deadline_s: float) -> Node:
        wanted = f"create {request.provisioning} {request.accelerator_type} node {name!r} in {zone}"
        if request.provisioning == "flex-start":
            message = "flex-start nodes are made by queued resources only"
            raise CloudError(ErrorKind.BAD_REQUEST, 3, message, wanted=wanted)
        message = api.CreateNodeRequest(
            parent=self._parent(zone), node_id=name, node=convert.node_message(request, queued=False)
        )
        try:
            future = await self._call(self._client.create_node, message, wanted=wanted, retry_on=calls.CREATE)
        except CloudError as error:
            if error.kind is not ErrorKind.ALREADY_EXISTS:
                raise
            existing = await self.get_node(zone, name)
            _check_intent(existing.labels, request.intent, wanted, error)
            return existing
        if not await self._finish(future.operation, wanted, deadline_s):
            raise CloudError(
                ErrorKind.TIMED_OUT, 0, f"not made within {deadline_s:g} s", wanted=wanted, in_operation=True
            )
        return await self.get_node(zone, name)

    async def get_node(self, zone: str, name: str) -> Node:
        message = await self._call(
            self._client.get_node,
            api.GetNodeRequest(name=self._node(zone, name)),
            wanted=f"look at node {name!r} in {zone}",
        )
        return convert.node(message)

    async def list_nodes(self, zone: str) -> list[Node]:
        request = api.ListNodesRequest(parent=self._parent(zone), page_size=self._policy.page_size)
        pages = self._pages(self._client.list_nodes, request, f"list nodes in {zone}")
        parts = [page.nodes.pb async for page in pages]
        return self._known_nodes.convert(zone, itertools.chain.from_iterable(parts))

    async def delete_node(self, zone: str, name: str) -> None:
        request = api.DeleteNodeRequest(name=self._node(zone, name))

        async def deleting() -> bool:
            return (await self.get_node(zone, name)).state is NodeState.DELETING

        await self._delete(self._client.delete_node, request, f"delete node {name!r} in {zone}", deleting)

    async def update_metadata(self, zone: str, node: str, changes: Mapping[str, str | None]) -> None:
        await self._change_metadata(
            zone,
            node,
            f"set metadata {', '.join(sorted(changes))} of node {node!r} in {zone}",
            lambda present: {k: v for k, v in {**present, **changes}.items() if v is not None},
        )

    async def add_ssh_keys(self, zone: str, node: str, lines: Sequence[str]) -> None:
        def added(present: dict[str, str]) -> dict[str, str]:
            known = present.get("ssh-keys", "").splitlines()
            return {**present, "ssh-keys": "\n".join(dict.fromkeys((*known, *lines)))}

        await self._change_metadata(zone, node, f"add SSH keys to node {node!r} in {zone}", added)

    async def _change_metadata(
        self, zone: str, node: str, wanted: str, change: Callable[[dict[str, str]], dict[str, str]]
    ) -> None:
        # The field is replaced as a whole: what is not sent again is lost.
        path = self._node(zone, node)
        message = await self._call(self._client.get_node, api.GetNodeRequest(name=path), wanted=wanted)
        present = dict(message.metadata)
        changed = change(present)
        if changed == present:
            return
        request = api.UpdateNodeRequest(
            node=api.Node(name=path, metadata=changed), update_mask={"paths": ["metadata"]}
        )
        future = await self._call(self._client.update_node, request, wanted=wanted)
        if not await self._finish(future.operation, wanted, _SHORT_OPERATION_S):
            raise CloudError(
                ErrorKind.TIMED_OUT, 0, f"not done within {_SHORT_OPERATION_S:g} s", wanted=wanted
            )

    async def host_identities(
        self, zone: str, node: str, workers: int | None = None
    ) -> dict[int, HostIdentity]:
        if workers is None:
            workers = len((await self.get_node(zone, node)).endpoints)
        answer = await self._call(
            self._client.get_guest_attributes,
            api.GetGuestAttributesRequest(
                name=self._node(zone, node),
                query_path="hostkeys/",
                worker_ids=[str(index) for index in range(workers)],
            ),
            wanted=f"look up host keys of node {node!r} in {zone}",
        )
        return convert.host_identities(list(answer.guest_attributes), workers)

    async def accelerator_types(self, zone: str) -> tuple[str, ...]:
        request = api.ListAcceleratorTypesRequest(parent=self._parent(zone), page_size=self._policy.page_size)
        pages = self._pages(self._client.list_accelerator_types, request, f"list accelerator types in {zone}")
        return tuple(
            [
                message.type_ or convert.short(message.name)
                async for page in pages
                for message in page.accelerator_types
            ]
        )

    async def runtime_versions(self, zone: str) -> tuple[str, ...]:
        request = api.ListRuntimeVersionsRequest(parent=self._parent(zone), page_size=self._policy.page_size)
        pages = self._pages(self._client.list_runtime_versions, request, f"list runtime versions in {zone}")
        return tuple(
            [
                message.version or convert.short(message.name)
                async for page in pages
                for message in page.runtime_versions
            ]
        )

    def _parent(self, zone: str) -> str:
        return f"projects/{self._project}/locations/{zone}"

    def _node(self, zone: str, name: str) -> str:
        return f"{self._parent(zone)}/nodes/{name}"

    def _queued_resource(self, zone: str, name: str) -> str:
        return f"{self._parent(zone)}/queuedResources/{name}"

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        request: object,
        *,
        wanted: str,
        retry_on: frozenset[ErrorKind] = calls.READ,
    ) -> Any:
        send = functools.partial(method, request=request, retry=None, metadata=self._metadata)
        answer = await calls.call(
            lambda timeout_s: send(timeout=timeout_s),
            wanted=wanted,
            retry_on=retry_on,
            policy=self._policy,
            clock=self._clock,
            chance=self._chance,
            tell=self._tell,
        )
        if self._silent:
            self._silent = False
            self._report("the Cloud TPU API answers again")
        return answer

    def _tell(self, failure: CloudError) -> None:
        """Once for each time that it is silent, however many calls meet that."""
        if not self._silent:
            self._silent = True
            self._report(f"the Cloud TPU API does not answer; trying again ({failure})")

    async def _pages(
        self, method: Callable[..., Awaitable[Any]], request: Any, wanted: str
    ) -> AsyncIterator[Any]:
        while True:
            page = await self._call(method, request, wanted=wanted)
            if page.unreachable:
                # A list with holes must not pass for a whole one: what is missing is unknown, not gone.
                raise CloudError(
                    ErrorKind.UNAVAILABLE, 14, f"no answer from {', '.join(page.unreachable)}", wanted=wanted
                )
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def _delete(
        self,
        method: Callable[..., Awaitable[Any]],
        request: object,
        wanted: str,
        deleting: Callable[[], Awaitable[bool]],
    ) -> None:
        """Send a deletion; one that is under way, or done, is a success too."""
        try:
            await self._call(method, request, wanted=wanted, retry_on=calls.DELETE)
        except CloudError as error:
            if error.kind in (ErrorKind.NOT_FOUND, ErrorKind.NO_QUEUE):
                return
            if error.kind is not ErrorKind.WRONG_STATE:
                raise
            try:
                under_way = await deleting()
            except CloudError as look:
                if look.kind is not ErrorKind.NOT_FOUND:
                    raise
                return
            if not under_way:
                raise

    async def _finish(self, operation: operations_pb2.Operation, wanted: str, deadline_s: float) -> bool:
        """Wait for an operation; False if it is still running after `deadline_s`.

        We poll it ourselves: the library's `result()` gives up at 900 s and cannot take a clock.
        """
        end = self._clock.monotonic() + deadline_s
        pause = 0.05
        while not operation.done:
            if self._clock.monotonic() + pause > end:
                return False
            await self._clock.sleep(pause)
            pause = min(1.6 * pause, 10.0)
            operation = await self._call(
                self._client.get_operation,
                operations_pb2.GetOperationRequest(name=operation.name),
                wanted=wanted,
            )
        if operation.HasField("error"):
            failure = convert.failure_of(operation.error)
            raise CloudError(failure.kind, failure.code, failure.message, wanted=wanted, in_operation=True)
        return True


def _check_intent(labels: Mapping[str, str], intent: str, wanted: str, cause: CloudError) -> None:
    found = labels.get(INTENT_LABEL)
    if found != intent:
        maker = f"intent {found}" if found else "somebody else (it has no intent label)"
        raise CloudError(
            ErrorKind.CONFLICT,
            cause.code,
            f"the name exists, made for {maker}; ours is {intent}",
            wanted=wanted,
        ) from cause
