"""`python -m flows.train …` as a person starts it: a process with output, signals and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import killed_at_end

EXIT_S = 60.0


@dataclass
class Started:
    """A process and the file that its output goes to."""

    process: asyncio.subprocess.Process
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        """Its exit code; fails with its output if it does not end in EXIT_S."""
        try:
            return await asyncio.wait_for(self.process.wait(), EXIT_S)
        except TimeoutError:
            raise AssertionError(f"it did not end in {EXIT_S:.0f} s; its output:\n{self.output}") from None


@contextlib.asynccontextmanager
async def started(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> AsyncIterator[Started]:
    """`python -m flows.train` with arguments; killed at the end of the block if it still runs."""
    file = folder / "output.txt"
    with file.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flows.train", *arguments, env=os.environ | (environment or {}),
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    async with killed_at_end(process):
        yield Started(process, file)


async def said(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of `python -m flows.train` with arguments."""
    async with started(folder, *arguments, environment=environment) as process:
        return await process.exit_code(), process.output
