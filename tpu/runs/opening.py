"""Open a run for a flow: create or take up its record, become its controller, find what an earlier driver left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpu.checkpoint import files, objects
from tpu.checkpoint.fence import load_fence
from tpu.clock import Clock, SystemClock
from tpu.cloud import TpuCloud
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.identity import ensure_identity
from tpu.runs.code import Bundle, resolve_code
from tpu.runs.config import RunConfig, Tracking
from tpu.runs.context import RunContext
from tpu.runs.controller import (
    Controller,
    ControllerLost,
    Owner,
    RunIsDriven,
    claim,
    may_claim,
    observe,
)
from tpu.runs.cost_limit import hold_max_cost
from tpu.runs.driver import RunDriver
from tpu.runs.event_log import EventLog, RunEvent
from tpu.runs.lanes import Lane, Lanes
from tpu.runs.launch import requirements_text, run_wanted
from tpu.runs.long_wait import note_long_waits
from tpu.runs.membership import Membership
from tpu.runs.parts import Part
from tpu.runs.record import (
    RunNotFound,
    RunRecord,
    check_same,
    code_url,
    correct,
    create_or_take_up,
    data_hash,
    load_record,
    never_began,
    run_directory,
)
from tpu.runs.slice_holder import SliceHolder
from tpu.runs.tenure import Tenure
from tpu.runs.tracker import CommitHeard, Tracker, check_tracking, sinks_of
from tpu.runs.watch import Listener
from tpu.slices.lease_book import GcsLeaseBook
from tpu.slices.monitor import Monitor, watching
from tpu.slices.pool_names import check_usable


class ForkUnfinished(RuntimeError):
    """A fork was interrupted before its checkpoint was there: it must not begin at step 0."""


class NoSuchSecret(LookupError):
    """A secret is not where the configuration says; the message names the place, never a value."""


@dataclass(frozen=True)
class Shared:
    """What the runs of one process use together: one client of the cloud, and one look at each zone for all."""

    cloud: TpuCloud
    monitor: Monitor


@contextlib.asynccontextmanager
async def sharing(
    connection: Connection, clock: Clock, report: Callable[[str], None]
) -> AsyncIterator[Shared]:
    """For the runs that are opened in the block."""
    async with open_cloud(connection, report=report) as cloud, watching(cloud, clock) as monitor:
        yield Shared(cloud, monitor)


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
    shared: Shared | None = None,
    told: Callable[[Sequence[RunEvent]], None] = lambda _: None,
    lanes: Lanes | None = None,
    wandb_key: str | None = None,
    part: Part | None = None,
) -> AsyncIterator[RunDriver]:
    """The driver of a run; let it `take_up` first what an earlier one left.

    What is not `shared` with other runs of this process it has for itself. `told` gets the run's history after each
    new event, as EventLog says. With `lanes` it is a pack, which trains their runs; with a `part` it takes part in
    another run. `wandb_key` is the API key for what `tracking` wants; offline without one.

    Raises:
        tpu.runs.config.RunConfigError: a package that `tracking` wants is not installed.
        tpu.runs.record.RunNameTaken: the name belongs to a run with another configuration that has begun.
        ForkUnfinished: the run is a fork that was interrupted.
        tpu.slices.pool_names.NoSuchPool: a new run names a pool that nobody has made.
        tpu.runs.controller.RunIsDriven: another live process drives it.
        tpu.runs.code.CodeError: the source cannot be had.
        tpu.connection.ConnectionSettingsError: project or bucket are not set.
        tpu.checkpoint.objects.BucketUnusable: there is no such bucket, or no right to it.
    """
    connection = connection or Connection.from_environment()
    clock = clock or SystemClock()
    check_tracking(config)  # before anything is made
    run_dir = run_directory(connection.bucket, config.name)
    members = lanes.names if lanes is not None else ()
    record, code = await asyncio.to_thread(
        _record,
        config,
        run_dir,
        connection,
        folder or Path.cwd(),
        clock.time(),
        members,
        "" if part is None else part.record.config.name,
    )
    async with _driving(
        record,
        code,
        run_dir,
        owner,
        secrets,
        report,
        listener,
        connection,
        take_over,
        clock,
        shared,
        told,
        config.tracking,
        wandb_key,
        spends=True,
        lanes=lanes,
        part=part,
    ) as driver:
        yield driver


@contextlib.asynccontextmanager
async def open_lane(
    config: RunConfig,
    owner: Owner,
    *,
    report: Callable[[str], None],
    connection: Connection,
    folder: Path,
    clock: Clock,
    wandb_key: str | None = None,
    take_over: bool = False,
    told: Callable[[Sequence[RunEvent]], None] = lambda _: None,
    spent: Callable[[], Sequence[RunEvent]] = lambda: (),
) -> AsyncIterator[Lane]:
    """A run that others train: its record, and the right to act for it, without a slice or a gang of its own.

    `spent` gives the histories of runs whose slices it pays for, besides the shares that stand in its own.

    Raises:
        As open_run.
    """
    run_dir = run_directory(connection.bucket, config.name)
    record, code = await asyncio.to_thread(_record, config, run_dir, connection, folder, clock.time())
    controller = await become_controller(run_dir, owner, take_over, clock, report)
    record, _ = await asyncio.to_thread(_corrected, run_dir, record, code, report)
    log = await asyncio.to_thread(EventLog, run_dir, controller.term, clock.time, told)
    tenure = Tenure(controller, run_dir, clock, report)
    sinks = sinks_of(config.tracking, record, run_dir, wandb_key, connection.home)
    lane = Lane(record, run_dir, log, tenure, Tracker(record, run_dir, sinks, tenure.check, report))
    lane.recall(await asyncio.to_thread(load_fence, run_dir))
    await log.note("driver-started", term=controller.term, owner=f"{owner.host}:{owner.pid}")
    tenure.start()
    spending = asyncio.create_task(hold_max_cost(record.config, log, tenure, clock, spent))
    try:
        async with lane.tracker:
            yield lane
    finally:
        spending.cancel()
        await asyncio.gather(spending, return_exceptions=True)
        with contextlib.suppress(ControllerLost):
            await tenure.leave()


@contextlib.asynccontextmanager
async def open_to_end(
    run_dir: str,
    owner: Owner,
    *,
    report: Callable[[str], None],
    listener: Listener,
    connection: Connection,
    clock: Clock | None = None,
) -> AsyncIterator[RunDriver]:
    """The driver of a run that is to end: it takes up a live gang, and neither data nor a new slice is needed.

    Raises:
        tpu.runs.record.RunNotFound: there is no such run.
        tpu.runs.controller.RunIsDriven: a live process drives it.
    """
    record = await asyncio.to_thread(load_record, run_dir)
    code = await asyncio.to_thread(_recorded_code, run_dir, record)
    async with _driving(
        record,
        code,
        run_dir,
        owner,
        {},
        report,
        listener,
        connection,
        False,
        clock or SystemClock(),
        None,
        lambda _: None,
        Tracking(),  # its last metrics are left to whoever goes on with it
        None,
        spends=False,
    ) as driver:
        await driver.take_up(to_end=True)
        yield driver


@contextlib.asynccontextmanager
async def _driving(
    record: RunRecord,
    code: Bundle,
    run_dir: str,
    owner: Owner,
    secrets: dict[str, str],
    report: Callable[[str], None],
    listener: Listener,
    connection: Connection,
    take_over: bool,
    clock: Clock,
    shared: Shared | None,
    told: Callable[[Sequence[RunEvent]], None],
    tracking: Tracking,
    wandb_key: str | None,
    *,
    spends: bool,
    lanes: Lanes | None = None,
    part: Part | None = None,
) -> AsyncIterator[RunDriver]:
    """A driver that holds the right to act, and gives it back at the end. One that `spends` is held to max_cost."""
    controller = await become_controller(run_dir, owner, take_over, clock, report)
    if spends:
        record, code = await asyncio.to_thread(_corrected, run_dir, record, code, report)
    log = await asyncio.to_thread(EventLog, run_dir, controller.term, clock.time, told)
    tenure, identity = Tenure(controller, run_dir, clock, report), ensure_identity(connection.home)
    wanted = run_wanted(record, connection, identity)
    book = GcsLeaseBook(connection.bucket, report)
    if spends and (minutes := connection.idle_minutes) is not None:
        await keep_idle(book, record.config.pool, minutes)
    member = Membership(book, record.config.pool, wanted, clock, report)
    async with contextlib.AsyncExitStack() as stack:
        ours = shared or await stack.enter_async_context(sharing(connection, clock, report))
        run = RunContext(
            record,
            run_dir,
            log,
            tenure,
            member,
            ours.cloud,
            ours.monitor,
            connection,
            identity,
            code,
            clock,
            report,
        )
        sinks = sinks_of(tracking, record, run_dir, wandb_key, connection.home)
        tracker = Tracker(record, run_dir, sinks, tenure.check, report)
        driver = RunDriver(run, SliceHolder(run), secrets, CommitHeard(listener, tracker), lanes, part)
        await log.note("driver-started", term=controller.term, owner=f"{owner.host}:{owner.pid}")
        tenure.start()
        member.start()
        beside: list[asyncio.Task[None]] = []
        if spends:
            beside.append(asyncio.create_task(hold_max_cost(record.config, log, tenure, clock)))
            beside.append(asyncio.create_task(note_long_waits(log, run_dir, clock)))
        try:
            async with tracker:
                yield driver
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            with contextlib.suppress(ControllerLost):
                await driver.leave()


async def keep_idle(book: GcsLeaseBook, pool: str, minutes: float) -> None:
    """Let the pool keep idle slices for so long, if it does not yet."""
    if (await book.settings(pool)).idle_minutes != minutes:
        await book.set_settings(pool, lambda settings: replace(settings, idle_minutes=minutes))


def _record(
    config: RunConfig,
    run_dir: str,
    connection: Connection,
    folder: Path,
    now: float,
    members: tuple[str, ...] = (),
    part_of: str = "",
) -> tuple[RunRecord, Bundle]:
    """The run's record, and the code it was created with: a run that is taken up keeps its code.

    Of a run that never began, the record that it is to have; see `_corrected`.
    """
    objects.check_bucket(connection.bucket)
    try:
        existing = load_record(run_dir)
    except RunNotFound:
        record, _ = _new_record(config, run_dir, connection, folder, now, members, part_of)
        record = create_or_take_up(run_dir, record)
        return record, _recorded_code(run_dir, record)
    fence = load_fence(run_dir)
    found = (existing.config, existing.data_sha256, existing.members, existing.part_of)
    same = found == (config, data_hash(config), members, part_of)
    if not same and never_began(existing, fence):
        return _new_record(config, run_dir, connection, folder, now, members, part_of)
    wanted = RunRecord(config, data_hash(config), existing.code, now, members=members, part_of=part_of)
    check_same(existing, wanted)
    if existing.parent is not None and not fence.commits:
        parent = f"{existing.parent['run']}@{existing.parent['step']}"
        raise ForkUnfinished(
            f"the fork {config.name} of {parent} was interrupted: the same `relay fork {parent} {config.name} …` "
            "finishes it"
        )
    return existing, _recorded_code(run_dir, existing)


def _new_record(
    config: RunConfig,
    run_dir: str,
    connection: Connection,
    folder: Path,
    now: float,
    members: tuple[str, ...],
    part_of: str,
) -> tuple[RunRecord, Bundle]:
    """A record that is not written yet, and its code, which is: whoever finds a record finds its code."""
    check_usable(connection.bucket, config.pool)
    bundle = resolve_code(config.code, folder, connection.home / "git")
    requirements_text(config, bundle)  # refused here, before anything is made
    code = {"source": bundle.source, "sha256": bundle.sha256}
    files.write(code_url(run_dir, code), bundle.data)
    return RunRecord(config, data_hash(config), code, now, members=members, part_of=part_of), bundle


def _corrected(
    run_dir: str, wanted: RunRecord, code: Bundle, report: Callable[[str], None]
) -> tuple[RunRecord, Bundle]:
    """The run as it is to be driven: one that never began takes the configuration that it is started with."""
    if load_record(run_dir) == wanted:
        return wanted, code
    record, changed = correct(run_dir, wanted)
    if changed:
        report(f"{wanted.config.name} never began, so it takes another configuration: {'; '.join(changed)}")
    return record, _recorded_code(run_dir, record)


def _recorded_code(run_dir: str, record: RunRecord) -> Bundle:
    data = files.read(code_url(run_dir, record.code))
    return Bundle(data, record.code["sha256"], record.code["source"])


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
            report(f"{why}; looking for {seen[0].expiry_s:.0f} s whether it lives")
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
        NoSuchSecret: it is not set.
    """
    if variable not in os.environ:
        raise NoSuchSecret(f"secret {name}: the variable {variable} is not set where the flow runs")
    return os.environ[variable]
