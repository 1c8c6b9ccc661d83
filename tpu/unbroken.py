"""Work that a cancellation must not leave half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def unbroken(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end even if we are cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # taken note of: the cancellation outranks it
        raise cancellation
    return task.result()
