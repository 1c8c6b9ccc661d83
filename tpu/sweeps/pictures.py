"""Pictures of a sweep as PNG: parallel coordinates, the metric, its fleet, and what trials cost.

They are read on dark pages as on light ones, and none grows with the number of trials: thousands of lines are so many
pixels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tpu.runs.drawing import INK, to_png
from tpu.sweeps.board import Standing, short_name
from tpu.sweeps.columns import Column, column_of, robust_scale, scale_ticks
from tpu.sweeps.curve import thinned
from tpu.sweeps.metric import EVALUATION, drawn_by_step
from tpu.sweeps.usage import FleetPoint, SliceLife, busy_share, fleet_use

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As the timeline of a run has them (tpu.runs.timeline).
STATES = {
    "finished": "#2e9e5b", "pruned": "#f0b23e", "failed": "#d1495b", "stopped": "#8b7bc7", "running": "#4f8fc4",
    "evaluating": "#93c5e8", "waiting": "#949494",
}  # fmt: skip
_BEST, _THERE, _HELD, _TRAINED = "#dc5348", "#b4c0cf", "#93c5e8", "#2e9e5b"
# Of the ground of words that stand on lines: white is read on it, and it is seen on a light page as on a dark one.
_LABEL = "#5b6675"
# From the worst to the best trial; each is read on white as on near-black.
_RANKS = ("#cdb95a", "#7fae6a", "#3b9c9c", "#3b6fe0")
# More axes than this are too close to be read; the parameters that come first in the file are shown.
MOST_AXES = 9
_BARS = 80
# So many lines are told apart; of more trials the best ones and every so-manieth of the others have one.
MOST_LINES, _BEST_LINES = 400, 100


@dataclass(frozen=True)
class Sight:
    """All that pictures of a sweep show, as it is at `now` (seconds since 1970)."""

    name: str
    metric: str
    goal: Literal["minimize", "maximize"]
    trials: Sequence[Standing]
    best: int | None
    lives: Mapping[str, SliceLife]
    now: float

    @property
    def began(self) -> float:
        """When the first chip was had, or the first trial ended."""
        times = [use.start for one in self.trials for use in one.uses]
        times += [one.ended for one in self.trials if one.ended is not None]
        return min(times, default=self.now)


def draw(sight: Sight) -> dict[str, bytes]:
    """The pictures by name; those of which there is nothing to show are left out."""
    made = {
        "parameters": parameters_picture(sight),
        "metric": metric_picture(sight),
        "fleet": fleet_picture(sight),
        "cost": cost_picture(sight),
    }
    return {name: picture for name, picture in made.items() if picture}


def parameters_picture(sight: Sight) -> bytes | None:
    """Parallel coordinates: a line a trial through its parameters to the metric, the better the bluer."""
    known = [one for one in sight.trials if _number(one.value) is not None]
    told = _with_lines(known, sight.goal)
    names = list(dict.fromkeys(name for one in told for name in one.trial.parameters))
    columns = {
        _cut(short_name(name, names)): [one.trial.parameters.get(name) for one in told] for name in names
    }
    if told and not columns:
        columns["seed"] = [one.trial.seed for one in told]
    columns = {name: values for name, values in columns.items() if len(set(map(repr, values))) > 1}
    shown = dict(list(columns.items())[: MOST_AXES - 1])
    if len(told) < 2 or not shown:
        return None
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap

    axes_of = [column_of(values) for values in shown.values()]
    values = [one.value for one in told if one.value is not None]
    scale = robust_scale(values)
    places = tuple(scale.at(value) for value in values)
    axes_of.append(Column(places, scale_ticks(scale, min(values), max(values))))
    figure, axes = _figure(3.6)
    # By rank, worst first: the best lie on top, and one that diverged does not take all of the colours.
    order = sorted(range(len(told)), key=lambda i: values[i], reverse=sight.goal == "minimize")
    ranks = {index: rank / max(1, len(told) - 1) for rank, index in enumerate(order)}
    colours = LinearSegmentedColormap.from_list("ranks", _RANKS)
    lines = LineCollection(
        [[(x, column.places[i]) for x, column in enumerate(axes_of)] for i in order],
        colors=[colours(ranks[i]) for i in order],
        linewidths=1.4 if len(told) <= 100 else 0.8,
        alpha=min(0.9, max(0.2, 60 / len(told))),
    )
    axes.add_collection(lines)
    best = next((i for i, one in enumerate(told) if one.trial.number == sight.best), None)
    if best is not None:
        axes.plot(range(len(axes_of)), [c.places[best] for c in axes_of], color=_BEST, linewidth=2.2)
    for x, column in enumerate(axes_of):
        axes.axvline(x, color=INK, linewidth=0.8)
        for place, word in column.ticks:
            axes.annotate(
                word, (x, place), (4, 0), textcoords="offset points", fontsize=6.5, va="center", color="white",
                bbox={"facecolor": _LABEL, "alpha": 0.9, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
    axes.set_xlim(-0.1, len(axes_of) - 1 + 0.35)
    axes.set_ylim(-0.05, 1.05)
    axes.set_xticks(range(len(axes_of)), [*shown, _cut(_plain(sight.metric))], fontsize=7.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    left_out = len(columns) - len(shown)
    more = f", {left_out} more parameters not shown" if left_out else ""
    some = f"{len(told)} of {len(known):,}" if len(told) < len(known) else f"{len(told)}"
    axes.set_xlabel(f"{some} trials, the bluer the better, the best in red{more}", fontsize=8)
    return _png(figure)


def metric_picture(sight: Sight) -> bytes | None:
    """Metric or loss of each trial by step; beside it what trials ended with over time, and the best so far."""
    drawn = _with_lines(sight.trials, sight.goal)
    curves = {one.trial.number: [p for p in one.curve if math.isfinite(p[1])] for one in drawn}
    ended = sorted(
        (one.ended, one.value, one.state)
        for one in sight.trials
        if one.ended is not None and _number(one.value) is not None and one.value is not None
    )
    logged = [value for curve in curves.values() for _, value in curve]
    values = [value for _, value, _ in ended]
    if not logged and not values:
        return None
    from matplotlib.collections import LineCollection

    figure, (by_step, by_time) = _figure(3.0, 2)
    lines = [(one, curves[one.trial.number]) for one in drawn if len(curves[one.trial.number]) > 1]
    most = 60 if len(lines) <= 100 else 20  # what many lines show does not hang on each one's points
    by_step.add_collection(
        LineCollection(
            [thinned(curve, most) for _, curve in lines],
            colors=[STATES[one.state] for one, _ in lines],
            linewidths=0.9 if len(lines) <= 100 else 0.5,
            alpha=min(0.8, max(0.15, 40 / max(1, len(lines)))),
        )
    )
    points = [curve[0] for curve in curves.values() if len(curve) == 1]
    if points:
        by_step.plot(*zip(*points, strict=True), ".", color=INK, markersize=3)
    if sight.best is not None and len(curves.get(sight.best, ())) > 1:
        by_step.plot(*zip(*curves[sight.best], strict=True), color=_BEST, linewidth=1.8)
    by_step.autoscale_view()
    some = f", {len(drawn)} of {len(sight.trials):,} trials" if len(drawn) < len(sight.trials) else ""
    by_step.set_xlabel(f"step{some}", fontsize=8)
    drawn_name = drawn_by_step(sight.metric)
    by_step.set_ylabel(_cut(drawn_name), fontsize=8)
    by_time.set_ylabel(_cut(_plain(sight.metric)), fontsize=8)
    began = sight.began
    unit, unit_s = _unit(sight.now - began)
    for state in ("pruned", "failed", "stopped", "finished"):
        if some := [((at - began) / unit_s, value) for at, value, kind in ended if kind == state]:
            by_time.plot(*zip(*some, strict=True), ".", color=STATES[state], markersize=4, label=state)
    best = _best_so_far(ended, sight.goal)
    if best:
        times = [(at - began) / unit_s for at, _ in best] + [(sight.now - began) / unit_s]
        values = [value for _, value in best]
        by_time.step(
            times, [*values, values[-1]], where="post", color=_BEST, linewidth=1.4, label="best so far"
        )
    by_time.set_xlabel(unit, fontsize=8)
    room = 0.06
    for axes, seen in ((by_step, logged), (by_time, values)):
        # One scale for both, if they show the same.
        if not (seen := logged + values if drawn_name == sight.metric else seen):
            continue
        scale = robust_scale(seen)
        if scale.logarithmic:
            axes.set_yscale("log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
            axes.tick_params(which="minor", labelsize=7)
            factor = (scale.high / scale.low) ** room
            axes.set_ylim(scale.low / factor, scale.high * factor)
        elif scale.high > scale.low:
            extra = room * (scale.high - scale.low)
            axes.set_ylim(scale.low - extra, scale.high + extra)
        axes.grid(alpha=0.25, linewidth=0.6)
    if ended:
        by_time.legend(fontsize=6.5, frameon=False, loc="best")
    return _png(figure)


def fleet_picture(sight: Sight) -> bytes | None:
    """Chips that were there over time, those that trials held, and those on which their programs ran."""
    points = fleet_use([use for one in sight.trials for use in one.uses], sight.lives)
    if len(points) < 2:
        return None
    figure, axes = _figure(2.5)
    unit, unit_s = _unit(points[-1].time - points[0].time)
    times = [(point.time - points[0].time) / unit_s for point in points]
    layers: tuple[tuple[str, str, list[float]], ...] = (
        ("there", _THERE, [point.there for point in points]),
        ("held by trials", _HELD, [point.held for point in points]),
        ("programs run", _TRAINED, [point.trained for point in points]),
    )
    for label, colour, chips in layers:
        axes.fill_between(times, chips, step="post", color=colour, linewidth=0, label=label)
    _finish(axes, unit, "chips", points)
    return _png(figure)


def _finish(axes: Axes, unit: str, what: str, points: Sequence[FleetPoint]) -> None:
    from matplotlib.ticker import MaxNLocator

    share = busy_share(points)
    if share is not None:
        axes.set_title(f"programs ran in {share:.0%} of all chip time", fontsize=8, loc="left")
    axes.set_xlabel(unit, fontsize=8)
    axes.set_ylabel(what, fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max(point.there for point in points) * 1.05 or 1)
    axes.margins(x=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(
        fontsize=6.5, ncols=3, loc="lower left", bbox_to_anchor=(0.45, 1.0), frameon=False, borderpad=0.1
    )


def cost_picture(sight: Sight) -> bytes | None:
    """What each trial has cost: US dollars, or chip-hours if no price is known."""
    priced = any(one.dollars for one in sight.trials)
    costs = [(one, (one.dollars or 0.0) if priced else one.chip_hours) for one in sight.trials]
    if not any(cost for _, cost in costs):
        return None
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(2.3)
    numbers, amounts = [one.trial.number for one, _ in costs], [cost for _, cost in costs]
    colours = [STATES[one.state] for one, _ in costs]
    if len(costs) <= _BARS:
        axes.bar(numbers, amounts, 0.8, color=colours, linewidth=0)
    else:  # bars of less than a pixel show or vanish by chance
        axes.scatter(numbers, amounts, s=4, c=colours, linewidths=0)
        axes.set_ylim(bottom=0)
    shown = dict.fromkeys(one.state for one, cost in costs if cost)
    axes.legend(
        handles=[Patch(color=STATES[state], label=state) for state in STATES if state in shown],
        fontsize=6.5, ncols=6, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, borderpad=0.1,
    )  # fmt: skip
    axes.set_xlabel("trial", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("US dollars" if priced else "chip-hours (no price is known)", fontsize=8)
    axes.margins(x=0.01)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    return _png(figure)


def _with_lines(trials: Sequence[Standing], goal: Literal["minimize", "maximize"]) -> list[Standing]:
    """Those that have a line of their own in a picture, in their order."""
    if len(trials) <= MOST_LINES:
        return list(trials)
    sign = 1 if goal == "minimize" else -1
    valued = [one for one in trials if one.state == "finished" and _number(one.value) is not None]
    best = sorted(valued, key=lambda one: sign * (one.value or 0.0))[:_BEST_LINES]
    numbers = {one.trial.number for one in best}
    others = [one for one in trials if one.trial.number not in numbers]
    room = MOST_LINES - len(best)
    numbers |= {others[i * len(others) // room].trial.number for i in range(room)}
    return [one for one in trials if one.trial.number in numbers]


def _best_so_far(
    ended: Sequence[tuple[float, float, str]], goal: Literal["minimize", "maximize"]
) -> list[tuple[float, float]]:
    """(time, value) of each trial that finished better than all before it."""
    found: list[tuple[float, float]] = []
    for at, value, state in ended:
        better = not found or (value < found[-1][1] if goal == "minimize" else value > found[-1][1])
        if state == "finished" and better:
            found.append((at, value))
    return found


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(metric: str) -> str:
    return metric.removeprefix(EVALUATION)


def _cut(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _figure(height: float, parts: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # slow to import, and only wanted here

    figure = Figure(figsize=(7.5, height), dpi=110, layout="constrained")
    made: Any = figure.subplots(1, parts)
    for axes in made if parts > 1 else (made,):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, made


def _png(figure: Figure) -> bytes:
    from PIL import Image  # matplotlib writes its own pictures with it

    picture = io.BytesIO()
    # With a palette a picture has a third of the bytes, and looks the same; this method alone knows transparency.
    with Image.open(io.BytesIO(to_png(figure))) as image:
        image.quantize(method=Image.Quantize.FASTOCTREE).save(picture, "png", optimize=True)
    return picture.getvalue()
