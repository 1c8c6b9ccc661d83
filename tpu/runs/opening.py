"""Open a run for a flow: create or take up its record, become its controller, find what an earlier driver left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tpu.checkpoint import files
from tpu.clock import Clock, SystemClock
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.identity import ensure_identity
from tpu.runs.code import Bundle, resolve_code
from tpu.runs.config import RunConfig
from tpu.runs.controller import (
    EXPIRY_S,
    Controller,
    ControllerLost,
    Owner,
    RunIsDriven,
    claim,
    may_claim,
    observe,
)
from tpu.runs.driver import RunDriver
from tpu.runs.event_log import EventLog
from tpu.runs.record import (
    RunNotFound,
    RunRecord,
    check_same,
    create_or_take_up,
    data_hash,
    load_record,
    run_directory,
)
from tpu.runs.watch import Listener


@contextlib.asynccontextmanager
async def open_run(
    config: RunConfig,
    owner: Owner,
    *,
    secrets: dict[str, str],
    report: Callable[[str], None],
    listener: Listener,
    connection: Connection | None = None,
    folder: Path | None = None,
    take_over: bool = False,
    clock: Clock | None = None,
) -> AsyncIterator[RunDriver]:
    """The driver of a run, with a live gang taken up if there is one.

    Raises:
        tpu.runs.record.RunNameTaken: the name belongs to a run with another configuration.
        tpu.runs.controller.RunIsDriven: another live process drives it.
        tpu.runs.code.CodeError: the source cannot be had.
        tpu.connection.ConnectionSettingsError: project or bucket are not set.
    """
    connection = connection or Connection.from_environment()
    clock = clock or SystemClock()
    run_dir = run_directory(connection.bucket, config.name)
    record, code = await asyncio.to_thread(
        _record, config, run_dir, connection, folder or Path.cwd(), clock.time()
    )
    controller = await become_controller(run_dir, owner, take_over, clock, report)
    log = await asyncio.to_thread(EventLog, run_dir, controller.term, clock.time)
    async with open_cloud(connection) as cloud:
        driver = RunDriver(
            record=record, run_dir=run_dir, connection=connection, cloud=cloud, code=code, secrets=secrets,
            identity=ensure_identity(connection.home), controller=controller, log=log, clock=clock,
            report=report, listener=listener,
        )  # fmt: skip
        await driver.note("driver-started", term=controller.term, owner=f"{owner.host}:{owner.pid}")
        driver.start_beating()
        try:
            await driver.take_up()
            yield driver
        finally:
            with contextlib.suppress(ControllerLost):
                await driver.leave()


def _record(
    config: RunConfig, run_dir: str, connection: Connection, folder: Path, now: float
) -> tuple[RunRecord, Bundle]:
    """The run's record, and the code it was created with: a run that is taken up keeps its code."""
    code = f"{run_dir}/code.tar.gz"
    try:
        existing = load_record(run_dir)
    except RunNotFound:
        bundle = resolve_code(config.code, folder, connection.home / "git")
        # Before the record, so that whoever finds a record finds its code.
        files.write(code, bundle.data)
        mine = RunRecord(config, data_hash(config), {"source": bundle.source, "sha256": bundle.sha256}, now)
        existing = create_or_take_up(run_dir, mine)
    else:
        check_same(existing, RunRecord(config, data_hash(config), existing.code, now))
    return existing, Bundle(files.read(code), existing.code["sha256"], existing.code["source"])


async def become_controller(
    run_dir: str, owner: Owner, take_over: bool, clock: Clock, report: Callable[[str], None]
) -> Controller:
    """Claim the run, after watching a driver that might be alive for as long as it may stay silent.

    Raises:
        RunIsDriven: it is alive.
    """
    seen = await asyncio.to_thread(observe, run_dir)
    since = clock.monotonic()
    said = False
    while seen is not None:
        allowed, why = may_claim(seen[0], owner, clock.monotonic() - since, take_over)
        if allowed:
            report(f"taking the run up: {why}")
            break
        if not said:
            report(f"{why}; looking for {EXPIRY_S:.0f} s whether it lives")
            said = True
        await clock.sleep(1.0)
        now = await asyncio.to_thread(observe, run_dir)
        if now is None or now[1] != seen[1]:
            raise RunIsDriven(
                f"{run_dir} is {why} and alive; nothing was changed. `relay stop` ends it, take_over takes it over"
            )
    return await asyncio.to_thread(claim, run_dir, owner, seen)


def environment_secret(name: str, variable: str) -> str:
    """The value of a secret that the flow's own environment holds.

    Raises:
        LookupError: it is not set; the message names the variable, never a value.
    """
    if variable not in os.environ:
        raise LookupError(f"secret {name}: the variable {variable} is not set where the flow runs")
    return os.environ[variable]
