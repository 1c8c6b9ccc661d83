"""`relay pool`: look at the slices that runs share, and say how many there are and how long idle ones are kept."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.configured import configured_connection

if TYPE_CHECKING:
    from tpu.slices.lease_book import GcsLeaseBook
    from tpu.slices.pool_settings import PoolSettings

pool_app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="The slices that runs share: who has them, and how long idle ones are kept.",
)  # fmt: skip

PoolName = Annotated[str, typer.Argument(metavar="NAME", help="name of a pool")]


def _book(pool: str) -> GcsLeaseBook:
    from tpu.slices.lease_book import GcsLeaseBook
    from tpu.slices.pool_settings import checked_name

    checked_name(pool)
    return GcsLeaseBook(configured_connection().bucket)


def _book_of(pool: str) -> GcsLeaseBook:
    """For what only looks: a pool that is not there is a slip of the pen."""
    from tpu.slices.pool_names import check_there

    book = _book(pool)
    check_there(configured_connection().bucket, pool)
    return book


@pool_app.command()
def show(name: PoolName = "default") -> None:
    """Show a pool: its slices, who has their chips and since when, who waits for them, and what they have cost."""
    from tpu.slices.pool_showing import pool_lines

    book = _book_of(name)

    async def look() -> list[str]:
        settings, kept = await asyncio.gather(book.settings(name), book.list(name, past=True))
        return pool_lines(name, settings, [one.lease for one in kept], time.time())

    print("\n".join(asyncio.run(look())))


@pool_app.command()
def cost(name: PoolName = "default") -> None:
    """Say what a pool has cost: to each run that had chips of it, and while nobody had them."""
    from tpu.slices.pool_cost import cost_lines, pool_cost

    book = _book_of(name)
    kept = asyncio.run(book.list(name, past=True))
    print("\n".join(cost_lines(pool_cost([one.lease for one in kept], time.time()))))


@pool_app.command(name="set")
def set_(
    name: PoolName = "default",
    idle_minutes: Annotated[
        float | None,
        typer.Option(help="keep a slice that nobody uses for so long; 0: its last run deletes it"),
    ] = None,
    min_slices: Annotated[
        int | None, typer.Option(help="keep so many, also when they are idle (the flow reap makes them)")
    ] = None,
    max_slices: Annotated[
        str | None, typer.Option(metavar="N|none", help="never have more than so many")
    ] = None,
    evict_minutes: Annotated[
        float | None, typer.Option(help="how long an evicted run may take to its next commit")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="a way to get the slices of min_slices, such as: 'spot v4-8 in us-central2-b at 3.22'"
        ),
    ] = None,
) -> None:
    """Change a pool's settings; what is not given stays as it is."""
    from tpu.slices.pool_showing import parse_candidate, pool_lines, to_be_reaped

    changes: dict[str, Any] = {
        "idle_minutes": idle_minutes,
        "min_slices": min_slices,
        "evict_minutes": evict_minutes,
        "candidates": tuple(map(parse_candidate, candidate)) if candidate else None,
    }
    changes = {field: value for field, value in changes.items() if value is not None}
    if max_slices is not None:
        changes["max_slices"] = _whole_or_none(max_slices)

    def change(settings: PoolSettings) -> PoolSettings:
        return dataclasses.replace(settings, **changes)

    book = _book(name)
    settings = asyncio.run(book.set_settings(name, change))
    print("\n".join(pool_lines(name, settings, [], time.time())[1:]))
    leases = [one.lease for one in asyncio.run(book.list(name))]
    if (told := to_be_reaped(name, settings, leases, time.time())) is not None:
        print(told)


def _whole_or_none(text: str) -> int | None:
    from tpu.slices.pool_settings import PoolSettingsError

    if text == "none":
        return None
    if not text.isascii() or not text.isdigit():
        raise PoolSettingsError(f"max_slices is a number or none, found {text!r}")
    return int(text)
