"""Delete the slices that nobody needs any more, and ask for those that pools lack. Runs every 10 minutes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from prefect import flow, get_run_logger

from flows.plain_errors import log_plainly
from tasks.reap import publish_pass, put_in_order, top_up_pools
from tpu.worker.patience import shorten_pauses


@flow(name="reap", flow_run_name="reap {pool}")
async def reap(
    pool: str = "all",
    dry_run: bool = False,
    zones: list[str] = [],  # noqa: B006 - `prefect deploy` reads the source, and a name is null in the form
) -> dict[str, Any]:
    """Put the project in order: every state and zone, by label.

    Args:
        pool: The pool whose slices are looked at, or all.
        dry_run: Say what would be deleted; change nothing.
        zones: Zones to ask one by one if the cloud does not answer for all of them at once; those of the pools'
            leases and settings come on top.

    Returns:
        What was deleted, left and in trouble, and the dollars an hour that are saved.
    """
    log_plainly()
    shorten_pauses()
    log = get_run_logger()
    only = None if pool == "all" else pool
    found = await put_in_order(only, tuple(zones), dry_run)
    topped_up = [] if dry_run else await top_up_pools(only)
    figures = await publish_pass(found, topped_up)
    for trouble in found.troubles:
        log.warning(trouble)
    return figures


if __name__ == "__main__":
    asyncio.run(reap(dry_run="--dry-run" in sys.argv[1:]))
