"""What a person sees of a sweep: a table that moves, the best so far, and the results in the bucket."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from tasks.progress import pause_s, rates
from tpu.money import in_dollars
from tpu.sweeps.board import Board, told
from tpu.sweeps.book import SweepBook

# A page with more rows is not read; the file of results has all of them.
MOST_ROWS = 500


class SweepPage:
    """Shows a board: at once when it is `final`, otherwise less often the longer the sweep lasts."""

    def __init__(
        self, name: str, board: Board, book: SweepBook, log: logging.Logger | logging.LoggerAdapter[Any]
    ) -> None:
        self._name = name
        self._board = board
        self._book = book
        self._log = log
        self._artifact: UUID | None = None
        self._began = time.monotonic()
        self._first_pause_s = rates().first_pause_s
        self._shown: float | None = None

    async def show(self, final: bool = False) -> None:
        now = time.monotonic()
        pause = pause_s(now - self._began, self._first_pause_s)
        if not final and self._shown is not None and now - self._shown < pause:
            return
        self._shown = now
        rows = self._board.rows()
        try:
            await asyncio.to_thread(self._book.save_results, rows)
            await self._show_table(rows)
        except Exception as error:  # a picture of progress must never end a training
            if final:
                self._log.warning("the sweep's page was not updated: %r", error)
            else:
                self._log.debug("the sweep's page was not updated: %r", error)

    async def _show_table(self, rows: list[dict[str, Any]]) -> None:
        text = headline(self._board)
        # Those that run and those that came last.
        shown = sorted(rows, key=lambda row: (row["state"] != "running", -row["trial"]))[:MOST_ROWS]
        if self._artifact is None:
            created = await acreate_table_artifact(shown, key=f"sweep-{self._name}", description=text)
            self._artifact = created if isinstance(created, UUID) else created.id
            return
        async with get_client() as client:
            await client.update_artifact(
                self._artifact,
                ArtifactUpdate(data=json.dumps(shown), description=text),
            )

    async def close(self) -> None:
        """The table as it is at the end, and a report."""
        await self.show(final=True)
        await acreate_markdown_artifact(
            summary(self._name, self._board, self._book.sweep_dir), key=f"report-{self._name}",
            description="Report of the sweep",
        )  # fmt: skip


def headline(board: Board) -> str:
    """`7 of 12 trials finished, 1 failed, 3 running; best loss 0.31 of icl-lr-1a2b3c4d (learning_rate=0.003)`."""
    parts = [f"{board.count('finished')} of {len(board.began)} trials begun have finished"]
    if pruned := board.count("pruned"):
        parts.append(f"{pruned} pruned")
    if failed := board.count("failed"):
        parts.append(f"{failed} failed")
    if stopped := board.count("stopped"):
        parts.append(f"{stopped} stopped")
    if board.live:
        parts.append(f"{len(board.live)} running")
    best = board.best()
    if best is None:
        return ", ".join(parts)
    trial, value = best
    return f"{', '.join(parts)}; best {board.metric} {value:.6g} of {trial.run} ({told(trial.parameters, trial.seed)})"


def summary(name: str, board: Board, sweep_dir: str) -> str:
    """The report in Markdown."""
    known = [one.dollars for one in board.ended.values() if one.dollars is not None]
    cost = in_dollars(sum(known)) if known else "not known: set slice.price_an_hour"
    lines = [
        f"# Sweep {name}", "", headline(board), "",
        f"Cost of all trials: {cost}. Every trial: `{sweep_dir}/results.csv`.",
    ]  # fmt: skip
    failed = [(board.began[n], one) for n, one in sorted(board.ended.items()) if one.state != "finished"]
    if failed:
        lines += ["", "| trial | run | state | why |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {trial.number} | {trial.run} | {one.state} | {one.reason.splitlines()[0] if one.reason else ''} |"
            for trial, one in failed
        ]
    return "\n".join(lines)
