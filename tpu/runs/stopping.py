"""Stop a run: ask its driver, or do what a driver would if there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tpu.checkpoint.fence import Fence, close_attempt, load_fence, update_fence
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.runs.controller import observe, this_process
from tpu.runs.event_log import RunEvent, load_events, undeleted
from tpu.runs.figures import collect, save_report
from tpu.runs.opening import open_to_end
from tpu.runs.overview import reached
from tpu.runs.parts import part_names
from tpu.runs.record import RunNotFound, RunRecord, load_record, run_directory
from tpu.runs.stop_request import request_stop

STOP_S = 900.0
LOOK_S = 0.5
WHY = "stopped by request"


class NotStopped(RuntimeError):
    """The run's driver was asked to stop and did not, in time."""


class NoListener:
    """Hears nothing: the gang is about to end."""

    def on_log(self, host: HostAddress, line: str) -> None: ...

    def on_event(self, host: HostAddress, record: dict[str, Any]) -> None: ...

    def on_end(self) -> None: ...


async def stop_run(
    connection: Connection, run_dir: str, report: Callable[[str], None], flow_run: str = "stop"
) -> None:
    """Return when the run has no gang and no slice; its newest checkpoint is as near as the notice allowed.

    Whoever does it for a flow run says so by its id: should it be interrupted, the run is still that flow run's.

    Raises:
        NotStopped: its driver lives and did not stop in STOP_S.
        tpu.runs.record.RunNotFound: there is no such run.
        tpu.runs.controller.RunIsDriven: somebody started it again meanwhile.
    """
    record = await asyncio.to_thread(load_record, run_dir)
    asked = await ask_driver(run_dir, report)
    if parts := part_names(record.config):
        why = None if _finished(record, await asyncio.to_thread(load_fence, run_dir), ()) else WHY
        if await _stop_parts(connection, run_dir, parts, flow_run):
            events = await asyncio.to_thread(load_events, run_dir)
            figures = await asyncio.to_thread(collect, record, run_dir, events, why, time.time())
            await asyncio.to_thread(save_report, run_dir, figures)
            asked = True
    events, fence = await asyncio.gather(
        asyncio.to_thread(load_events, run_dir), asyncio.to_thread(load_fence, run_dir)
    )
    left = fence.open or bool(undeleted(events))
    if left:
        owner = this_process(flow_run)
        async with open_to_end(
            run_dir, owner, report=report, listener=NoListener(), connection=connection
        ) as driver:
            await driver.clean_up(WHY)
            events, fence = driver.log.events, await driver.fence()
            why = None if _finished(record, fence, events) else WHY
            figures = await asyncio.to_thread(collect, record, run_dir, events, why, time.time())
        await asyncio.to_thread(save_report, run_dir, figures)
    report(_outcome(record, fence, events, did_something=asked or left))


async def _stop_parts(connection: Connection, run_dir: str, parts: Sequence[str], flow_run: str) -> bool:
    """End what is left of a run's slices all at once, since one of them saves; whether there was something."""
    before = await asyncio.to_thread(load_fence, run_dir)

    async def stop(name: str) -> None:
        with suppress(RunNotFound):
            await stop_run(connection, run_directory(connection.bucket, name), lambda _: None, flow_run)

    await asyncio.gather(*map(stop, parts))
    await asyncio.to_thread(update_fence, run_dir, close_attempt)
    return before.open


def _finished(record: RunRecord, fence: Fence, events: Sequence[RunEvent]) -> bool:
    return reached(record, fence, events) >= record.config.steps


def _outcome(record: RunRecord, fence: Fence, events: Sequence[RunEvent], did_something: bool) -> str:
    name = record.config.name
    if _finished(record, fence, events):
        told = "no gang and no slice is left" if did_something else "nothing to stop"
        return f"{name} is finished; {told}"
    begin = (
        f"goes on from step {reached(record, fence, events)}" if record.config.commits else "starts it again"
    )
    return f"stopped: no gang and no slice is left; python -m flows.train --resume {name} {begin}"


async def ask_driver(run_dir: str, report: Callable[[str], None]) -> bool:
    """Return when no live process drives the run (or the sweep): whether one did and was asked."""
    seen = await asyncio.to_thread(observe, run_dir)
    if seen is None or not seen[0].drives:
        return False
    term, owner = seen[0].term, seen[0].owner
    await asyncio.to_thread(request_stop, run_dir, term)
    report(f"asked process {owner.pid} on {owner.host} to stop; waiting until it has saved and cleaned up")
    heard = began = time.monotonic()
    while time.monotonic() - began < STOP_S:
        await asyncio.sleep(LOOK_S)
        now = await asyncio.to_thread(observe, run_dir)
        if now is None or now[0].term != term or not now[0].drives:
            return True
        if now[1] != seen[1]:
            seen, heard = now, time.monotonic()
        elif (silent_s := time.monotonic() - heard) > seen[0].expiry_s:
            report(f"process {owner.pid} on {owner.host} was silent for {silent_s:.0f} s: taken as dead")
            return True
    raise NotStopped(
        f"process {owner.pid} on {owner.host} lives but did not stop the run in {STOP_S:.0f} s; look at its log, "
        "or end it there and stop the run again"
    )
