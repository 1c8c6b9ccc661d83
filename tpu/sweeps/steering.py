"""Steer a sweep from anywhere: what is wished for is checked, and left in the bucket for whoever drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from tpu.checkpoint import objects
from tpu.connection import Connection
from tpu.runs.config import RunConfig, RunConfigError
from tpu.runs.controller import observe
from tpu.runs.record import RunNotFound, run_directory
from tpu.runs.stopping import ask_driver, stop_run
from tpu.sweeps import grid
from tpu.sweeps.board import told
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import MOST_TRIALS, Search
from tpu.sweeps.packing import check_together, runs_of
from tpu.sweeps.parameters import canonical
from tpu.sweeps.trial import Trial, trial_run
from tpu.sweeps.wishes import WishBox, Wishes
from tpu.train.packs import PackError

LOWEST_PRIORITY, HIGHEST_PRIORITY = -1000, 1000


class SweepNotFound(LookupError):
    """There is no such sweep in the bucket."""


class WishRefused(ValueError):
    """What is wished for cannot be; the message says why, and what can."""


@dataclass(frozen=True)
class Steered:
    """A sweep of the bucket, to be steered. `name` is its own, `run` and `search` are as it was started."""

    name: str
    sweep_dir: str
    run: RunConfig
    search: Search

    @property
    def book(self) -> SweepBook:
        return SweepBook(self.sweep_dir)

    @property
    def wishes(self) -> WishBox:
        return WishBox(self.sweep_dir)


def find_sweep(bucket: str, name: str) -> Steered:
    """Raises SweepNotFound."""
    sweep_dir = sweep_directory(bucket, name)
    if (found := SweepBook(sweep_dir).settings()) is None:
        names = objects.folders(f"{bucket}/sweeps")
        near = get_close_matches(name, names, 1) or names[-5:]
        raise SweepNotFound(
            f"there is no sweep {name} in {bucket}; there {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
            if near
            else f"there is no sweep in {bucket} yet: python -m flows.sweep FILE"
        )
    return Steered(name, sweep_dir, *found)


def cancel_trials(sweep: Steered, which: Sequence[str]) -> list[str]:
    """Have these trials, by number or by the name of their run, not trained any further.

    Raises:
        WishRefused: there is no such trial, or it has ended.
    """
    trials, outcomes = sweep.book.trials(), sweep.book.outcomes()
    numbers = [_number(sweep, trials, one) for one in which]
    for number in numbers:
        if (outcome := outcomes.get(number)) is not None:
            raise WishRefused(f"trial {number} of {sweep.name} has ended already: it is {outcome.state}")
    sweep.wishes.change(
        lambda wishes: replace(wishes, cancelled=tuple(sorted({*wishes.cancelled, *numbers})))
    )
    return [
        f"trial {number}, {told(trials[number].parameters, trials[number].seed)}, is cancelled: it saves and gives its "
        "chips back; --rerun-failed lets it go on"
        for number in numbers
    ]


def _number(sweep: Steered, trials: Sequence[Trial], text: str) -> int:
    for trial in trials:
        if text in (str(trial.number), trial.run):
            return trial.number
    begun = f"trials 0 to {len(trials) - 1} have begun" if trials else "none has begun"
    raise WishRefused(f"there is no trial {text} in {sweep.name}: {begun}, and `relay sweep show` lists them")


def set_priority(sweep: Steered, priority: int) -> list[str]:
    """Raises WishRefused: no run can have this priority."""
    if not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise WishRefused(f"a priority goes from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}; found {priority}")
    sweep.wishes.change(lambda wishes: replace(wishes, priority=priority))
    return [f"{sweep.name} has priority {priority}: trials that run, too"]


def raise_runs(sweep: Steered, runs: int) -> list[str]:
    """Have so many runs drawn from the space in all.

    Raises:
        WishRefused: fewer than there are, or more than the space has.
    """
    most = grid.count(sweep.search.parameters) * sweep.search.seeds_a_point
    if sweep.search.method == "grid" and runs > most:
        raise WishRefused(
            f"the grid of {sweep.name} has {most} runs in all; add points of your own by --param"
        )
    if runs > MOST_TRIALS:
        raise WishRefused(f"a sweep has at most {MOST_TRIALS:,} runs; start another one")

    def change(wishes: Wishes) -> Wishes:
        now = max(sweep.search.runs, wishes.runs or 0)
        if runs <= now:
            raise WishRefused(f"{sweep.name} has at most {now} runs already: give more than that")
        return replace(wishes, runs=runs)

    sweep.wishes.change(change)
    return [f"{sweep.name} has at most {runs} runs now"]


def add_point(sweep: Steered, values: Mapping[str, Any]) -> list[str]:
    """Have a point trained, with each seed of the sweep; it may lie outside of the space.

    Raises:
        WishRefused: a parameter is missing or not known, the run cannot be so, or there is such a trial.
    """
    point = _point(sweep, values)
    try:
        made = [trial_run(sweep.run, point, seed) for seed in sweep.search.seeds or [None]]
        if sweep.search.pack is not None:
            begun = [trial_run(sweep.run, one.parameters, one.seed) for one in sweep.book.trials()[:1]]
            check_together(begun + made)
    except (RunConfigError, PackError) as error:
        raise WishRefused(f"such a trial cannot be: {str(error).splitlines()[0]}") from None
    for trial in sweep.book.trials():
        if canonical(trial.parameters) == canonical(point):
            raise WishRefused(f"trial {trial.number} of {sweep.name} has these parameters: {trial.run}")

    def change(wishes: Wishes) -> Wishes:
        if canonical(point) in map(canonical, wishes.added):
            raise WishRefused(f"{told(point, None)} was added to {sweep.name} already, and comes next")
        return replace(wishes, added=(*wishes.added, point))

    sweep.wishes.change(change)
    seeds = sweep.search.seeds_a_point
    return [
        f"{told(point, None)} is added to {sweep.name}: {seeds} trial{'s' if seeds > 1 else ''}, before the others"
    ]


def _point(sweep: Steered, values: Mapping[str, Any]) -> dict[str, Any]:
    """In the order of the space, with what is the same in every trial filled in."""
    space = sweep.search.parameters
    if unknown := [name for name in values if name not in space]:
        raise WishRefused(
            f"{unknown[0]} is no parameter of {sweep.name}, which has {', '.join(space) or 'none'}"
        )
    point: dict[str, Any] = {}
    for name, parameter in space.items():
        if name in values:
            point[name] = values[name]
        elif parameter.applies(point):
            choices = parameter.choices
            if choices is None or len(choices) != 1:
                raise WishRefused(f"{name} is missing: give it, too, as --param {name}=VALUE")
            point[name] = choices[0]
    return point


def who_hears(sweep: Steered) -> str:
    """Whether somebody acts on what was wished, and what to do otherwise."""
    seen, taken = observe(sweep.sweep_dir), sweep.wishes.read().taken
    if taken and seen is not None and seen[0].drives:
        owner = seen[0].owner
        return f"process {owner.pid} on {owner.host} drives the sweep and hears it within seconds"
    return "nobody drives the sweep: it counts once it is started again (python -m flows.sweep FILE, or its deployment)"


async def stop_sweep(connection: Connection, sweep: Steered, report: Callable[[str], None]) -> None:
    """Return when no trial has a gang or a slice. Started again the sweep goes on.

    Raises:
        tpu.runs.stopping.NotStopped: its driver lives and does not stop.
    """
    asked = await ask_driver(sweep.sweep_dir, report)
    outcomes = await asyncio.to_thread(sweep.book.outcomes)
    trials = await asyncio.to_thread(sweep.book.trials)
    for run in runs_of(sweep.name, [trial for trial in trials if trial.number not in outcomes]):
        try:
            await stop_run(connection, run_directory(connection.bucket, run), report)
        except RunNotFound:
            continue  # it was about to begin
    report(f"{sweep.name} {'is stopped' if asked else 'was not driven'}; started again it goes on")
