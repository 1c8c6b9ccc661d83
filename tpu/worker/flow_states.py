"""The states of all flow runs that a worker watches over, by one request every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

READ_S, PAGE = 2.0, 200
# Prefect Cloud counts requests of a whole account.
CLOUD_READ_S = 10.0


class FlowStates:
    """The newest known state of each flow run; a server that is away or too busy leaves what was known."""

    def __init__(self, client: PrefectClient, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._client = client
        self._log = log
        self._watched: Counter[UUID] = Counter()
        self._known: dict[UUID, State | None] = {}
        self._deleted: set[UUID] = set()
        self._pause_s = CLOUD_READ_S if get_current_settings().connected_to_cloud else READ_S

    @contextlib.contextmanager
    def watching(self, flow_run_id: UUID) -> Iterator[None]:
        self._watched[flow_run_id] += 1
        try:
            yield
        finally:
            self._watched[flow_run_id] -= 1
            if not self._watched[flow_run_id]:
                del self._watched[flow_run_id]
                self._known.pop(flow_run_id, None)
                self._deleted.discard(flow_run_id)

    def of(self, flow_run_id: UUID) -> State | None:
        """The state that was read last; None before the first time."""
        return self._known.get(flow_run_id)

    def deleted(self, flow_run_id: UUID) -> bool:
        """Whether the server answered that there is no such flow run."""
        return flow_run_id in self._deleted

    async def keep_reading(self) -> None:
        trouble = False
        while True:
            try:
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # it is asked again soon
                    await self._read()
                trouble = False
            except Exception as error:
                if not trouble:
                    why = str(error) or type(error).__name__
                    self._log.warning("the Prefect server does not tell the states of flow runs: %s", why)
                trouble = True
            await asyncio.sleep(self._pause_s)

    async def _read(self) -> None:
        wanted = list(self._watched)
        for start in range(0, len(wanted), PAGE):
            ids = wanted[start : start + PAGE]
            runs = await self._client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)), limit=PAGE
            )
            found = {run.id: run.state for run in runs}
            for one in ids:
                if one not in self._watched:
                    continue
                if one in found:
                    self._known[one] = found[one]
                else:
                    self._deleted.add(one)
