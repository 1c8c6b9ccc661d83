"""The report of a sweep as Markdown: best so far, trials, pictures, what failed and why. Pure.

Its length does not grow with the number of trials: it says of how many it shows which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tpu.money import in_dollars
from tpu.sweeps.board import Board, Standing, short_name, told
from tpu.sweeps.pictures import Sight

# Rows of the table, and lines of what did not finish.
MOST_ROWS, MOST_REASONS = 30, 20
_TITLES = {
    "parameters": "Parameters",
    "metric": "By step, and what trials ended with over time",
    "fleet": "Fleet use over time",
    "cost": "Cost per trial",
}


def headline(board: Board) -> str:
    """`7 of 12 trials finished, 1 failed, 3 running; best loss 0.31 of icl-lr-1a2b3c4d (learning_rate=0.003)`."""
    parts = [f"{board.count('finished')} of {len(board.began)} trials begun have finished"]
    for state in ("pruned", "failed", "stopped"):
        if number := board.count(state):
            parts.append(f"{number} {state}")
    if board.live:
        parts.append(f"{len(board.live)} running")
    best = board.best()
    if best is None:
        return ", ".join(parts)
    trial, value = best
    return f"{', '.join(parts)}; best {board.metric} {value:.6g} of {trial.run} ({told(trial.parameters, trial.seed)})"


def to_markdown(sight: Sight, title: str, pictures: Mapping[str, str], folder: str) -> str:
    """`title` is the headline, `pictures` are URLs of those of `pictures.draw`, `folder` is the sweep's own."""
    lines = [f"# Sweep {sight.name}", "", f"{title}.", "", *_facts(sight), ""]
    lines += [*_table(sight), ""]
    for name, heading in _TITLES.items():
        if url := pictures.get(name):
            lines += [f"## {heading}", "", f"![{heading}]({url})", ""]
    lines += _reasons(sight.trials)
    lines += [
        "## Files", "",
        f"Every trial: `{folder}/results.parquet`, `results.csv` and `results.jsonl` beside it. "
        f"`relay sweep show {sight.name}` lists them; each is a run: `relay show RUN`.",
    ]  # fmt: skip
    return "\n".join(lines)


def _facts(sight: Sight) -> Iterator[str]:
    counts = Counter(one.state for one in sight.trials)
    yield f"| trials | {', '.join(f'{number} {state}' for state, number in counts.items()) or 'none'} |"
    yield "| --- | --- |"
    best = next((one for one in sight.trials if one.trial.number == sight.best), None)
    if best is not None and best.value is not None:
        what = _cell(told(best.trial.parameters, best.trial.seed))
        yield f"| best so far | {sight.metric} **{best.value:.6g}** of trial {best.trial.number} ({what}) |"
    known = [one.dollars for one in sight.trials if one.dollars is not None]
    yield f"| cost of all trials | {in_dollars(sum(known)) if known else 'not known: set slice.price_an_hour'} |"
    hours = sum(one.chip_hours for one in sight.trials)
    yield f"| chip-hours | {hours:.3g} |"
    attempts = sum(one.attempts for one in sight.trials)
    yield f"| attempts | {attempts} |"


def _table(sight: Sight) -> list[str]:
    """The best that have ended, and of those that run what comes first."""
    sign = 1 if sight.goal == "minimize" else -1

    def rank(one: Standing) -> tuple[bool, bool, float, int]:
        value = one.value
        known = value is not None and math.isfinite(value)
        return (
            one.state != "finished",
            not known,
            sign * value if known and value is not None else 0.0,
            one.trial.number,
        )

    ranked = sorted(sight.trials, key=rank)
    shown = ranked[:MOST_ROWS]
    heading = "## Trials"
    if len(shown) < len(ranked):
        heading += f": the best {len(shown)} of {len(ranked):,}"
    lines = [
        heading, "",
        f"| trial | parameters | state | step | {_cell(sight.metric)} | attempts | cost | VM and chip |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    names = {name for one in shown for name in one.trial.parameters}
    for one in shown:
        value = "" if one.value is None else f"{one.value:.6g}"
        cost = "" if one.dollars is None else in_dollars(one.dollars)
        parameters = {short_name(name, names): set_to for name, set_to in one.trial.parameters.items()}
        what = told(parameters, one.trial.seed)
        lines.append(
            f"| {one.trial.number} | {_cell(what)} | {one.state} | {one.step} | {value} | {one.attempts} | {cost} "
            f"| {_cell(one.where)} |"
        )
    return lines


def _reasons(trials: Sequence[Standing]) -> list[str]:
    """Why trials ended early; failures first, since pruned ones did what was wanted of them."""
    order = ("failed", "stopped", "pruned")
    early = sorted((one for one in trials if one.state in order), key=lambda one: order.index(one.state))
    if not early:
        return []
    lines = ["## What did not finish", ""]
    lines += [
        f"- trial {one.trial.number}, {one.trial.run}: **{one.state}**"
        + (f", {_cell(one.reason.splitlines()[0])}" if one.reason else "")
        for one in early[:MOST_REASONS]
    ]
    if len(early) > MOST_REASONS:
        lines.append(f"- and {len(early) - MOST_REASONS:,} more, with their reasons in the results")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]
