"""Whether Prefect is ready for runs: its server, and the work pool with its workers."""

from __future__ import annotations

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from tpu.readiness.finding import Finding, good, unknown, wrong

TYPE = "cloud-tpu"
SERVER, ANSWER_S = "Prefect server", 10.0


async def look_at_prefect(pool: str | None) -> list[Finding]:
    """Server and work pool; without a name the pool `tpu`, if there is one: runs from a terminal need none."""
    url = PREFECT_API_URL.value()
    if not url:
        if pool is None:
            return [
                good(SERVER, "PREFECT_API_URL is not set: each run from a terminal starts one of its own")
            ]
        return [wrong(SERVER, "PREFECT_API_URL is not set, and a work pool wants a server", "make up")]
    try:
        async with get_client(httpx_settings={"timeout": ANSWER_S}) as client:
            if (error := await client.api_healthcheck()) is not None:
                return [_away(url, error)]
            return [good(SERVER, f"answers at {url}"), *await _pool(client, pool)]
    except Exception as error:  # whatever a server, a proxy or a wrong key makes of the first request
        return [_away(url, error)]


def _away(url: str, error: Exception) -> Finding:
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
        return wrong(SERVER, f"{url} does not take PREFECT_API_KEY", "prefect cloud login")
    why = str(error) or type(error).__name__
    return wrong(SERVER, f"none answers at {url} ({why}); set PREFECT_API_URL to one that runs", "make up")


async def _pool(client: PrefectClient, name: str | None) -> list[Finding]:
    what = f"work pool {name or 'tpu'}"
    try:
        pool = await client.read_work_pool(name or "tpu")
    except ObjectNotFound:
        make = f"prefect work-pool create {name or 'tpu'} --type {TYPE}"
        if name is None:
            return [unknown(what, "there is none; only deployments need it", make)]
        return [wrong(what, "there is none", make)]
    if pool.type != TYPE:
        text = f"it is of the type {pool.type}, whose workers know nothing of slices"
        return [wrong(what, text, f"prefect work-pool create {pool.name}-{TYPE} --type {TYPE}")]
    if pool.is_paused:
        return [wrong(what, "it is paused", f"prefect work-pool resume {pool.name}")]
    workers = await client.read_workers_for_work_pool(pool.name)
    online = [one.name for one in workers if one.status == WorkerStatus.ONLINE]
    if not online:
        start = f"prefect worker start --pool {pool.name}"
        return [wrong(what, "no worker of it is online, so nothing that is started runs", start)]
    return [good(what, f"of the type {TYPE}, with {', '.join(online)} online")]
