"""What the Prefect server has recorded of flow runs, read back through its API."""

from __future__ import annotations

import asyncio

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.sorting import ArtifactSort, LogSort
from prefect.events.filters import EventFilter, EventNameFilter, EventOrder, EventResourceFilter
from prefect.events.schemas.events import Event, ResourceSpecification

PAGE = 200
# A flow's process sends its log every 2 s; the server writes it in batches.
RECORDED_S, LOOK_S = 30.0, 0.5


def called(name: str) -> FlowRunFilter:
    return FlowRunFilter(name=FlowRunFilterName(any_=[name]))


async def flow_runs(name: str) -> list[FlowRun]:
    """Flow runs called `name`, oldest first."""
    async with get_client() as client:
        found = await client.read_flow_runs(flow_run_filter=called(name))
    return sorted(found, key=lambda run: run.created)  # type: ignore[arg-type, return-value]


async def until_task_runs(name: str, *wanted: str) -> None:
    """Return once all task runs `wanted` are recorded; fails if they are not in RECORDED_S.

    A flow that has ended well may have told its server more than that has written down.
    """
    found: set[str] = set()
    try:
        async with asyncio.timeout(RECORDED_S), get_client() as client:
            while not found.issuperset(wanted):
                await asyncio.sleep(LOOK_S)
                runs = await client.read_task_runs(flow_run_filter=called(name), limit=PAGE)
                found = {run.name for run in runs}
    except TimeoutError:
        raise AssertionError(f"no {set(wanted) - found} among the task runs of {name}: {found}") from None


async def log_of(client: PrefectClient, name: str) -> str:
    """The whole log of all flow runs called `name`, a line a message."""
    lines: list[str] = []
    for run in await client.read_flow_runs(flow_run_filter=called(name)):
        where = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        offset = 0
        while page := await client.read_logs(where, limit=PAGE, offset=offset, sort=LogSort.TIMESTAMP_ASC):
            lines += [entry.message for entry in page]
            offset += len(page)
    return "\n".join(lines)


async def log_with(name: str, *words: str) -> str:
    """The log once it holds all `words`; fails with the log if it does not in RECORDED_S."""
    text = ""
    try:
        async with asyncio.timeout(RECORDED_S), get_client() as client:
            while not all(word in text for word in words):
                await asyncio.sleep(LOOK_S)
                text = await log_of(client, name)
    except TimeoutError:
        missing = [word for word in words if word not in text]
        raise AssertionError(f"the Prefect log of {name} has no {missing}; it is:\n{text}") from None
    return text


async def artifacts() -> list[Artifact]:
    """The newest artifacts on the server, the newest last."""
    async with get_client() as client:
        return (await client.read_artifacts(limit=PAGE, sort=ArtifactSort.CREATED_DESC))[::-1]


async def events_of(name: str, *wanted: str) -> list[Event]:
    """Our events of the run called `name`, oldest first, once all of `wanted` are among them."""
    found: list[Event] = []
    where = EventFilter(
        event=EventNameFilter(prefix=["tpu."]), order=EventOrder.ASC,
        resource=EventResourceFilter(labels=ResourceSpecification({"prefect.resource.name": name})),
    )  # type: ignore[call-arg]  # fmt: skip
    try:
        async with asyncio.timeout(RECORDED_S), get_client() as client:
            while not {one.event for one in found}.issuperset(wanted):
                await asyncio.sleep(LOOK_S)
                found = list((await client.read_events(where, limit=50)).events)
    except TimeoutError:
        raise AssertionError(f"no {set(wanted)} among the events of {name}: {found}") from None
    return found
