"""A flow with no work in it: what Prefect itself costs."""

from __future__ import annotations

import asyncio

from prefect import flow


@flow(name="empty")
async def empty(seconds: float) -> None:
    """Live for so long and do nothing."""
    await asyncio.sleep(seconds)
