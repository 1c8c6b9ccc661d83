"""All conditions, in the order in which a person mends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tpu.clock import Clock, SystemClock
from tpu.cloud import CloudError
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import open_cloud
from tpu.cloud.project import GoogleProject
from tpu.cloud.rest import RestApi
from tpu.connection import Connection
from tpu.readiness import bucket, caller, reach, rights
from tpu.readiness.caller import ANYBODY, Caller
from tpu.readiness.finding import Finding, State, good, unknown, wrong
from tpu.slices.candidate import Candidate
from tpu.slices.preflight import Traffic, settings_problems
from tpu.slices.request import SliceRequest

# Nobody waits minutes to hear that nothing answers.
_POLICY = CallPolicy(try_s=3.0, total_s=5.0)


@dataclass(frozen=True)
class Wish:
    """What is to be made, once everything is ready. `request` is the same in all of the candidates' ways."""

    candidates: tuple[Candidate, ...]
    request: SliceRequest
    allow_regions: tuple[str, ...] = ()


async def look(connection: Connection, wish: Wish, clock: Clock | None = None) -> list[Finding]:
    """Look at everything; what one condition lacks does not hide the others. Makes nothing but one small object."""
    first, who = await caller.credentials(connection)
    found = [first, caller.ssh_key(connection.home)]
    stored = await asyncio.to_thread(bucket.bucket, connection, wish.candidates[0].region, who or ANYBODY)
    found.append(stored)
    if stored.state is State.HOLDS:
        found += await asyncio.to_thread(bucket.place, connection, wish.candidates, wish.allow_regions)
    found += await asyncio.to_thread(_settings, connection, wish)
    if who is None:
        return [*found, unknown("project", "not looked at without credentials")]
    found += await _cloud(connection, wish, who)
    async with _project(connection) as project:
        if project is None:
            return [
                *found,
                unknown("project", "TPU_RELAY_REST_ENDPOINT is not set, so nobody could be asked"),
            ]
        found += await _in_project(project, connection, wish, who, clock or SystemClock())
    return found


async def _cloud(connection: Connection, wish: Wish, who: Caller) -> list[Finding]:
    """The API in each zone, and what the zones that answer offer."""
    try:
        async with open_cloud(connection, policy=_POLICY) as cloud:
            zones = {
                zone: await rights.api(cloud, zone, connection.project, who)
                for zone in dict.fromkeys(one.zone for one in wish.candidates)
            }
            offers = [
                await rights.offer(cloud, one, wish.request.of(one))
                for one in wish.candidates
                if zones[one.zone].state is State.HOLDS  # else it would say nothing new
            ]
            return [*zones.values(), *offers]
    except CloudError as error:
        return [wrong("Cloud TPU API", str(error))]


async def _in_project(
    project: GoogleProject, connection: Connection, wish: Wish, who: Caller, clock: Clock
) -> list[Finding]:
    name = connection.project
    return [
        await caller.clock(project, name, clock),
        await rights.permissions(project, name, who, iap=connection.ssh_route == "iap"),
        *await rights.service_account(project, name, wish.request.service_account, connection.bucket, who),
        *await rights.quotas(project, name, wish.candidates),
        *await reach.reach(project, connection, wish.request, [one.region for one in wish.candidates]),
    ]


@contextlib.asynccontextmanager
async def _project(connection: Connection) -> AsyncIterator[GoogleProject | None]:
    if connection.api_endpoint is not None and connection.rest_endpoint is None:
        yield None
        return
    api = RestApi(connection)
    try:
        yield GoogleProject(api, connection.project)
    finally:
        api.close()


def _settings(connection: Connection, wish: Wish) -> list[Finding]:
    """Grant, and programs and addresses that the way to the hosts needs."""
    found: dict[str, Finding] = {}
    for candidate in wish.candidates:
        for _, text in settings_problems(
            [candidate], wish.request.of(candidate), connection, None, (), Traffic(None, 0)
        ):
            found.setdefault(text, wrong(f"settings for {candidate}", text))
    return list(found.values()) or [
        good("settings", f"hosts are reached by the route {connection.ssh_route}")
    ]
