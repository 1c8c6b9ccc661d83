"""`relay sweep`: look at a sweep, and steer it while it runs, from any machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from flows.configured import configured_connection

if TYPE_CHECKING:
    from tpu.sweeps.steering import Steered

sweep_app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Sweeps: their trials, and what is to become of them.",
)  # fmt: skip

SweepName = Annotated[str, typer.Argument(metavar="SWEEP", help="name of a sweep")]


def _found(name: str) -> Steered:
    from tpu.sweeps.steering import find_sweep

    return find_sweep(configured_connection().bucket, name)


def _answer(sweep: Steered, lines: list[str]) -> None:
    from tpu.sweeps.steering import who_hears

    print("\n".join([*lines, who_hears(sweep)]))


@sweep_app.command()
def show(sweep: SweepName) -> None:
    """List the trials of a sweep: number, run, state, step, metric and why it has ended."""
    from tpu.sweeps.showing import sweep_lines

    print("\n".join(sweep_lines(_found(sweep))))


@sweep_app.command()
def cancel(
    sweep: SweepName,
    trials: Annotated[list[str], typer.Argument(metavar="TRIAL…", help="numbers of trials, or their runs")],
) -> None:
    """Have trials not trained any further; the others go on. They save, and give their chips back."""
    from tpu.sweeps.steering import cancel_trials

    found = _found(sweep)
    _answer(found, cancel_trials(found, trials))


@sweep_app.command()
def stop(sweep: SweepName) -> None:
    """Stop a sweep with all its trials: they save, and their slices are deleted. Started again it goes on."""
    from tpu.sweeps.steering import stop_sweep

    asyncio.run(stop_sweep(configured_connection(), _found(sweep), lambda text: print(text, flush=True)))


@sweep_app.command()
def priority(
    sweep: SweepName,
    number: Annotated[int, typer.Argument(help="in a full pool higher ones evict lower ones")],
) -> None:
    """Change the priority of a sweep, of trials that run, too. Write a negative one behind `--`."""
    from tpu.sweeps.steering import set_priority

    found = _found(sweep)
    _answer(found, set_priority(found, number))


@sweep_app.command()
def add(
    sweep: SweepName,
    runs: Annotated[
        int | None, typer.Option(min=1, help="new number of runs that are drawn from the space")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="a parameter of a point of your own, which comes next"),
    ] = None,
) -> None:
    """Add trials to a sweep: more of its space, or a point of your own, with all seeds of the sweep."""
    from tpu.runs.config import parse_changes
    from tpu.sweeps.steering import WishRefused, add_point, raise_runs

    found, lines = _found(sweep), []
    if runs is None and not param:
        raise WishRefused("say what to add: --runs N, or --param NAME=VALUE for each parameter")
    if param:
        lines += add_point(found, parse_changes(param))
    if runs is not None:
        lines += raise_runs(found, runs)
    _answer(found, lines)
