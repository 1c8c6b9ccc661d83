"""A run's report on a terminal: headings and tables in place of Markdown's signs."""

from __future__ import annotations

import re
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table


class _FoldedTable(TableElement):
    """A table that breaks a long word, such as a hash, where rich would cut it off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class _Report(Markdown):
    elements = Markdown.elements | {"table_open": _FoldedTable}


def print_rendered(markdown: str, folder: str, terminal: TextIO) -> None:
    """Print a report as tables and headings; of a picture, where it lies below `folder`."""
    # A terminal shows neither pictures nor HTML.
    text = re.sub(r"!\[([^]]*)\]\(([^)]*)\)", rf"\1: {folder}/\2", markdown).replace("<br>", "; ")
    Console(file=terminal).print(_Report(text, hyperlinks=False))
