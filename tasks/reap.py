"""One pass of the reaper, and what pools lack."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.fleet import publish_fleet
from tpu.checkpoint import objects
from tpu.checkpoint.retry import StorageUnavailable
from tpu.clock import SystemClock
from tpu.cloud import CloudError
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.runs.reap_report import figures, headline, to_markdown
from tpu.runs.reaping import Reaped, Reaper, Scope
from tpu.runs.top_up import top_up
from tpu.slices.lease import LEASE_TTL_S, MalformedLease
from tpu.slices.lease_book import GcsLeaseBook, LeaseContended
from tpu.slices.pool_settings import PoolSettingsError

# So long a holder is watched in silence before what it has is deleted; a living one beats every LEASE_BEAT_S.
WATCH_S = LEASE_TTL_S


def worth_another_try(_task: Any, _task_run: Any, state: Any) -> bool:
    """A cloud or a bucket that does not answer; what is missing or malformed does not pass by itself."""
    error = state.data
    return isinstance(error, StorageUnavailable) or (isinstance(error, CloudError) and error.retryable)


@task(
    name="put_in_order",
    task_run_name="put the project in order",
    retries=2,
    retry_delay_seconds=20,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
)
async def put_in_order(pool: str | None, zones: tuple[str, ...], dry_run: bool) -> Reaped:
    """Look, watch, decide, and unless it is a dry run, delete."""
    log = get_run_logger()
    connection = Connection.from_environment()
    await asyncio.to_thread(objects.check_bucket, connection.bucket)
    async with open_cloud(connection) as cloud:
        reaper = Reaper(
            Scope(connection.bucket, pool, zones), cloud, GcsLeaseBook(connection.bucket), SystemClock(), log.info,
            ttl_s=WATCH_S,
        )  # fmt: skip
        return await reaper.run(dry_run=dry_run)


@task(name="top_up_pools", task_run_name="ask for what pools lack", cache_policy=NO_CACHE)
async def top_up_pools(pool: str | None) -> list[str]:
    """What was asked for, a sentence a pool that lacked slices."""
    log = get_run_logger()
    connection, clock = Connection.from_environment(), SystemClock()
    book = GcsLeaseBook(connection.bucket)
    names = await asyncio.to_thread(objects.folders, f"{connection.bucket}/pools")
    told: list[str] = []
    async with open_cloud(connection) as cloud:
        for name in names:
            if pool not in (None, name):
                continue
            try:
                settings = await book.settings(name)
                done = await top_up(name, settings, connection, cloud, book, clock, log.info)
            except (
                PoolSettingsError, MalformedLease, LeaseContended, StorageUnavailable, CloudError,
            ) as error:  # fmt: skip
                log.warning("pool %s: %s", name, error)
                done = f"pool {name}: {error}"
            if done is not None:
                told.append(done)
    return told


@task(name="publish_pass", task_run_name="report", cache_policy=NO_CACHE)
async def publish_pass(found: Reaped, topped_up: list[str]) -> dict[str, Any]:
    """The pass as an artifact, the slices that there are now as another, and the pass's figures."""
    log = get_run_logger()
    log.info(headline(found))
    for sentence in topped_up:
        log.info(sentence)
    await acreate_markdown_artifact(
        to_markdown(found, topped_up), key="reaper", description="What the reaper deleted and left alone"
    )
    await publish_fleet(Connection.from_environment().bucket, log)
    return {**figures(found), "topped_up": topped_up}
