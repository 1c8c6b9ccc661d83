"""Processes that a test starts and that may not outlive it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar


class Process(Protocol):
    """What asyncio's processes and flows that are forked have in common."""

    @property
    def returncode(self) -> int | None: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...


Some = TypeVar("Some", bound=Process)


@contextlib.asynccontextmanager
async def killed_at_end(process: Some) -> AsyncIterator[Some]:
    """The process for the block; if it still runs then, it is killed."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
