"""Stop a run: ask its driver, or do what a driver would if there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.runs.controller import observe, this_process
from tpu.runs.opening import open_run
from tpu.runs.record import load_record
from tpu.runs.stop_request import request_stop

STOP_S = 900.0


class NoListener:
    """Hears nothing: the gang is about to end."""

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None: ...


async def stop_run(connection: Connection, run_dir: str, report: Callable[[str], None]) -> None:
    """Return when the run has no gang and no slice.

    Raises:
        TimeoutError: its driver did not stop in STOP_S.
        tpu.runs.record.RunNotFound: there is no such run.
    """
    record = load_record(run_dir)
    seen = observe(run_dir)
    if seen is not None and not seen[0].released and not seen[0].owner.known_dead():
        term = seen[0].term
        request_stop(run_dir, term)
        report(f"asked process {seen[0].owner.pid} on {seen[0].owner.host} to stop; waiting")
        async with asyncio.timeout(STOP_S):
            while (now := observe(run_dir)) is not None and now[0].term == term and not now[0].released:
                if now[0].owner.known_dead():
                    break
                await asyncio.sleep(0.5)
    async with open_run(
        record.config,
        this_process("stop"),
        secrets={},
        report=report,
        listener=NoListener(),
        connection=connection,
    ) as driver:
        await driver.clean_up("stopped by request")
    report("stopped: no gang and no slice is left")
