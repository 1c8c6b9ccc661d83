"""What a person sees of a sweep: a table and a report that move, and the results in the bucket."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from tasks.progress import pause_s, rates
from tpu.checkpoint import files
from tpu.clock import Clock
from tpu.sweeps.board import Board
from tpu.sweeps.book import SweepBook
from tpu.sweeps.fleet import SliceLives
from tpu.sweeps.pictures import Sight, draw
from tpu.sweeps.report import headline, to_markdown

# A page with more rows is not read; the file of results has all of them.
MOST_ROWS = 500
# Pictures are a hundred kilobytes and a second of a core: so many tables come before they are made anew.
PICTURE_PAUSES = 10
# Table and pictures grow with the sweep, and who refills chips needs the same core: they take no more of the time.
TABLE_SHARE, PICTURE_SHARE = 0.05, 0.02


class SweepPage:
    """Shows a board beside the sweep, less often the longer it lasts, and at last as it has ended."""

    def __init__(
        self,
        name: str,
        board: Board,
        book: SweepBook,
        lives: SliceLives,
        clock: Clock,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._name = name
        self._board = board
        self._book = book
        self._lives = lives
        self._clock = clock
        self._log = log
        self._table: UUID | None = None
        self._report: UUID | None = None
        self._began = time.monotonic()
        self._first_pause_s = rates().first_pause_s
        self._shown: float | None = None
        self._drawn = self._began
        self._table_s = self._picture_s = 0.0  # what the last one took
        self._showing: asyncio.Task[None] | None = None

    async def show(self) -> None:
        """Begin to show the board as it is now, if it is time; who refills chips does not wait for it."""
        now = time.monotonic()
        busy = self._showing is not None and not self._showing.done()
        pause_s = max(self._pause_s(now, 1), self._table_s / TABLE_SHARE)
        if busy or (self._shown is not None and now - self._shown < pause_s):
            return
        self._shown = now
        drawing = now - self._drawn >= max(
            self._pause_s(now, PICTURE_PAUSES), self._picture_s / PICTURE_SHARE
        )
        if drawing:
            self._drawn = now
        self._showing = asyncio.create_task(self._try_to_show(drawing))

    def _pause_s(self, now: float, times: int) -> float:
        return pause_s(now - self._began, times * self._first_pause_s)

    async def _try_to_show(self, drawing: bool) -> None:
        try:
            await self._show(drawing)
        except Exception as error:  # a picture of progress must never end a training
            self._log.debug("the sweep's page was not updated: %r", error)

    async def _show(self, drawing: bool) -> None:
        now, began = self._clock.time(), time.monotonic()
        rows = self._board.rows(now)
        text = headline(self._board)
        await asyncio.to_thread(self._book.save_results, rows)
        # Those that run and those that came last.
        rows.sort(key=lambda row: (row["state"] != "running", -row["trial"]))
        left_out = f"; {MOST_ROWS} of {len(rows):,} trials are shown" if len(rows) > MOST_ROWS else ""
        shown = rows[:MOST_ROWS]
        if self._table is None:
            made: Any = await acreate_table_artifact(
                shown, key=f"sweep-{self._name}", description=text + left_out
            )
            self._table = made if isinstance(made, UUID) else made.id
        else:
            await _update(self._table, json.dumps(shown), text + left_out)
        self._table_s = time.monotonic() - began
        if drawing:
            await self._show_report(now, text)
            self._picture_s = time.monotonic() - began - self._table_s

    async def _show_report(self, now: float, text: str) -> None:
        trials, best = self._board.standings(now), self._board.best()
        lives = await self._lives.of({use.slice for one in trials for use in one.uses}, now)
        sight = Sight(
            self._name,
            self._board.metric,
            self._board.goal,
            trials,
            best[0].number if best else None,
            lives,
            now,
        )
        pictures = await asyncio.to_thread(draw, sight)
        folder = self._book.sweep_dir
        await asyncio.to_thread(_save, sight, text, pictures, folder)
        inline = {
            name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in pictures.items()
        }
        markdown = to_markdown(sight, text, inline, folder)
        if self._report is None:
            made: Any = await acreate_markdown_artifact(
                markdown, key=f"report-{self._name}", description=text
            )
            self._report = made if isinstance(made, UUID) else made.id
        else:
            await _update(self._report, markdown, text)

    async def close(self) -> None:
        """The table and the report as they are at the end."""
        if self._showing is not None:
            await self._showing
        try:
            await self._show(drawing=True)
        except Exception as error:  # the sweep itself has ended well
            self._log.warning("the sweep's page was not updated: %r", error)


async def _update(artifact: UUID, data: str, description: str) -> None:
    async with get_client() as client:
        await client.update_artifact(artifact, ArtifactUpdate(data=data, description=description))


def _save(sight: Sight, text: str, pictures: dict[str, bytes], folder: str) -> None:
    """`report/report.md` and its pictures beside it; a later report replaces them."""
    for name, picture in pictures.items():
        files.write(f"{folder}/report/{name}.png", picture)
    named = {name: f"{name}.png" for name in pictures}
    files.write(f"{folder}/report/report.md", to_markdown(sight, text, named, folder).encode())
