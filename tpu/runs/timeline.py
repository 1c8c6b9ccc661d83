"""A picture of a run: one bar a slice over time, coloured by where the seconds went, losses and commits marked."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu.runs.drawing import INK, to_png
from tpu.runs.event_log import RunEvent
from tpu.runs.goodput import BUCKETS, Bucket, Interval, pieces, run_intervals

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Bucket, str] = {
    "step": "#2e9e5b",
    "wasted": "#d1495b",
    "provisioning": "#b4c0cf",
    "sync": "#93c5e8",
    "start": "#4f8fc4",
    "restore": "#8b7bc7",
    "compile": "#f0b23e",
    "save": "#1f6f78",
    "evaluation wait": "#c58bb0",
    "idle": "#d3d3d3",
    "other": "#949494",
}
# How the early end of an attempt is marked: sign and colour. A run that was stopped is not marked.
_ENDS = {"preempted": ("X", "#000000"), "evicted": ("v", "#6d28d9"), "failed": ("D", "#c2410c")}
# So many slices have a line each, with their names. The time of a run with more is wrapped into lines, as text is, so
# that a bar stays wide enough to be read: about so many slices a line, and no more than so many lines.
NAMED_SLICES, SLICES_A_LINE, MOST_LINES = 14, 8, 25
_HOUR, _DAY = 3600, 86400
_LINES_S = (60, 120, 300, 600, 1200, 1800, _HOUR, 2 * _HOUR, 3 * _HOUR, 4 * _HOUR, 6 * _HOUR, 8 * _HOUR, 12 * _HOUR,
            _DAY, 2 * _DAY, 4 * _DAY, 7 * _DAY)  # fmt: skip
# Shares of the width: commits are marked no closer than the one, and what is narrower than the other is not drawn.
LEAST_GAP, LEAST_PART = 1 / 160, 1 / 1000


@dataclass(frozen=True)
class Bar:
    """A slice from its intent to its end: neighbouring parts, and the times at which checkpoints were committed on it.

    `ends` holds (time, preempted, evicted or failed) of the attempts on it that ended early. Times are seconds since
    1970.
    """

    slice: str
    parts: tuple[Interval, ...]
    commits: tuple[float, ...] = ()
    ends: tuple[tuple[float, str], ...] = ()

    @property
    def start(self) -> float:
        return self.parts[0].start

    @property
    def end(self) -> float:
        return self.parts[-1].end


@dataclass(frozen=True)
class Timeline:
    """All bars of a run in the order of their start."""

    start: float
    end: float
    bars: tuple[Bar, ...]


def make_timeline(events: Sequence[RunEvent], until: float) -> Timeline:
    """What is known of a run's slices, from its events up to `until` (seconds since 1970)."""
    begin = events[0].time if events else until
    known = run_intervals(events)
    commits: dict[str, list[float]] = {}
    ends: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        if event.kind == "attempt-ended":
            detail: dict[str, Any] = event.detail
            commits.setdefault(detail["slice"], []).extend(at for at, _ in detail.get("commits", ()))
            if (end := _early_end(detail)) is not None:
                ends.setdefault(detail["slice"], []).append((detail["ended"], end))
    lives = _lives(events, until)
    whole = pieces(known, begin, max((life[3] for life in lives), default=begin))
    starts = [piece.start for piece in whole]
    bars = []
    for name, wanted, ready, gone in lives:
        parts = [Interval("provisioning", wanted, ready)] if ready > wanted else []
        for piece in whole[max(0, bisect_right(starts, ready) - 1) : bisect_left(starts, gone)]:
            a, b = max(piece.start, ready), min(piece.end, gone)
            parts += [Interval(piece.bucket, a, b)] if a < b else []
        if parts:
            bars.append(Bar(name, tuple(parts), tuple(commits.pop(name, ())), tuple(ends.pop(name, ()))))
    return Timeline(begin, max(begin, until), tuple(bars))


def _early_end(detail: Mapping[str, Any]) -> str | None:
    if detail.get("evicted"):
        return "evicted"
    if detail["verdict"] in ("finished", "cancelled"):
        return None
    return "preempted" if detail["verdict"] == "preempted" else "failed"


def _lives(events: Sequence[RunEvent], until: float) -> list[tuple[str, float, float, float]]:
    """(slice, wanted, ready, gone) of each time that a run had a slice; ready is gone for one that never was ready."""
    wanted: dict[str, float] = {}
    ready: dict[str, float] = {}
    lives: list[tuple[str, float, float, float]] = []
    for event in events:
        name, at = event.detail.get("slice", ""), event.time
        match event.kind:
            case "slice-intended":
                wanted[name] = at
            case "slice-leased":
                wanted.setdefault(name, at)
                ready.setdefault(name, at)
            case "slice-ready" if name in wanted:
                ready.setdefault(name, at)
            case "slice-deleted" | "slice-released" if name in wanted:
                lives.append((name, wanted.pop(name), ready.pop(name, at), at))
    lives += [(name, begin, ready.get(name, until), until) for name, begin in wanted.items()]
    return sorted(lives, key=lambda life: life[1])


@dataclass(frozen=True)
class Layout:
    """Where time and slices are drawn: `lines` one below the other, `span` seconds each, of `lanes` rows; `lane` says
    in which of them a bar lies."""

    start: float
    span: float
    lines: int
    lanes: int
    lane: tuple[int, ...]

    def places(self, bar: int, start: float, end: float) -> list[tuple[int, float, float]]:
        """(row, from, to) of a stretch of time of a bar, with times since the beginning of the row's line."""
        found = []
        for line in range(self._line(start), self._line(end) + 1):
            begin = self.start + line * self.span
            a, b = max(start, begin), min(end, begin + self.span)
            if b > a or start == end:
                found.append((line * self.lanes + self.lane[bar], a - begin, b - begin))
        return found

    def _line(self, time: float) -> int:
        return min(self.lines - 1, max(0, int((time - self.start) / self.span)))


def layout_of(timeline: Timeline) -> Layout:
    """A line of its own for each of a few slices; for many, as few lanes as slices that were there at once."""
    bars, length = timeline.bars, timeline.end - timeline.start
    if len(bars) <= NAMED_SLICES:
        return Layout(timeline.start, length, 1, len(bars), tuple(range(len(bars))))
    free_at: list[float] = []
    lane: list[int] = []
    for bar in bars:
        found = next((one for one, at in enumerate(free_at) if at <= bar.start), len(free_at))
        if found == len(free_at):
            free_at.append(bar.end)
        free_at[found] = bar.end
        lane.append(found)
    lanes = len(free_at)
    lines = min(-(-len(bars) // (SLICES_A_LINE * lanes)), max(1, MOST_LINES // lanes))
    span = next((one for one in _LINES_S if one >= length / lines), length / lines)
    return Layout(timeline.start, span, -int(-length // span), lanes, tuple(lane))


def visible(parts: Sequence[Interval], least_s: float) -> list[Interval]:
    """The parts, with those shorter than `least_s` joined to their neighbours under what most of the time was.

    Drawn one by one, parts of less than a pixel show or vanish by chance.
    """
    found: list[Interval] = []
    seconds: Counter[Bucket] = Counter()
    start = parts[0].start
    for part in parts:
        length = part.end - part.start
        if length >= least_s:  # what is pending is too short to be drawn: the neighbour has it
            found.append(Interval(part.bucket, part.start if found else start, part.end))
            seconds, start = Counter(), part.end
            continue
        seconds[part.bucket] += length  # type: ignore[assignment]
        if part.end - start >= least_s:
            found.append(Interval(seconds.most_common(1)[0][0], start, part.end))
            seconds, start = Counter(), part.end
    if seconds and not found:
        found.append(Interval(seconds.most_common(1)[0][0], start, parts[-1].end))
    ends = [one.start for one in found[1:]] + [parts[-1].end]
    return [Interval(one.bucket, one.start, end) for one, end in zip(found, ends, strict=True)]


def timeline_picture(timeline: Timeline, title: str, named: Callable[[Bucket], str] = str) -> bytes | None:
    """The timeline as PNG, its buckets `named` so; None if there never was a slice."""
    if not timeline.bars or timeline.end <= timeline.start:
        return None
    from matplotlib.figure import Figure  # slow to import, and only wanted here

    layout = layout_of(timeline)
    rows = layout.lines * layout.lanes
    figure = Figure(figsize=(7.5, 1.4 + rows * min(0.34, max(0.12, 7 / rows))), dpi=132, layout="constrained")
    axes = figure.subplots()
    unit, unit_s = _unit(layout.span)
    _draw_bars(axes, timeline, layout, unit_s)
    _draw_marks(axes, timeline, layout, unit_s)
    axes.set_ylim(rows - 0.3, -0.7)
    axes.set_xlim(0, layout.span / unit_s)
    axes.set_xlabel(f"{unit}, the lines one after the other" if layout.lines > 1 else unit, fontsize=8)
    axes.tick_params(labelsize=8)
    _name_rows(axes, timeline, layout)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=9, loc="left")
    _legend(figure, timeline, named)
    return to_png(figure)


def _draw_bars(axes: Axes, timeline: Timeline, layout: Layout, unit_s: float) -> None:
    from matplotlib.collections import PolyCollection

    by_bucket: dict[Bucket, list[tuple[int, float, float]]] = {}
    for index, bar in enumerate(timeline.bars):
        for part in visible(bar.parts, LEAST_PART * layout.span):
            by_bucket.setdefault(part.bucket, []).extend(layout.places(index, part.start, part.end))
    # One collection a bucket: a long run has thousands of parts.
    for bucket, places in by_bucket.items():
        corners = [
            ((begin / unit_s, row - 0.33), (begin / unit_s, row + 0.33),
             (end / unit_s, row + 0.33), (end / unit_s, row - 0.33))
            for row, begin, end in places
        ]  # fmt: skip
        axes.add_collection(PolyCollection(corners, facecolors=COLOURS[bucket], linewidths=0))


def _draw_marks(axes: Axes, timeline: Timeline, layout: Layout, unit_s: float) -> None:
    last: dict[int, float] = {}
    commits: list[tuple[int, float]] = []
    for index, bar in enumerate(timeline.bars):
        for at in bar.commits:
            for row, begin, _ in layout.places(index, at, at):
                if begin - last.get(row, -layout.span) >= LEAST_GAP * layout.span:
                    last[row] = begin
                    commits.append((row, begin / unit_s))
    if commits:
        rows, times = zip(*commits, strict=True)
        axes.vlines(
            times, [row + 0.34 for row in rows], [row + 0.5 for row in rows], color=INK, linewidth=0.9
        )
    for end, (marker, colour) in _ENDS.items():
        ends = [
            (begin / unit_s, row)
            for index, bar in enumerate(timeline.bars)
            for at, kind in bar.ends
            if kind == end
            for row, begin, _ in layout.places(index, at, at)
        ]
        if ends:
            axes.plot(
                *zip(*ends, strict=True), marker, color=colour, markersize=6.5, markeredgecolor="white",
                markeredgewidth=0.6, clip_on=False,
            )  # fmt: skip


def _name_rows(axes: Axes, timeline: Timeline, layout: Layout) -> None:
    """The slices' names, or at which time since the beginning a line begins."""
    axes.tick_params(axis="y", length=0)
    if layout.lines == 1 and layout.lanes == len(timeline.bars):
        names = [bar.slice.removeprefix("relay-") for bar in timeline.bars]
        axes.set_yticks(range(layout.lanes), names, fontsize=7)
        return
    unit, unit_s = _unit(timeline.end - timeline.start)
    begins = [f"{round(line * layout.span / unit_s, 2):g} {unit}" for line in range(layout.lines)]
    axes.set_yticks([line * layout.lanes for line in range(layout.lines)], begins, fontsize=7)


def _legend(figure: Figure, timeline: Timeline, named: Callable[[Bucket], str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(marker: str, colour: str, label: str, **edge: Any) -> Line2D:
        return Line2D([], [], marker=marker, color=colour, linestyle="", markersize=6, label=label, **edge)

    shown = {part.bucket for bar in timeline.bars for part in bar.parts}
    handles: list[Artist] = [Patch(color=COLOURS[one], label=named(one)) for one in BUCKETS if one in shown]
    if any(bar.commits for bar in timeline.bars):
        handles.append(mark("|", INK, "commit"))
    counts = Counter(kind for bar in timeline.bars for _, kind in bar.ends)
    handles += [
        mark(*_ENDS[end], f"{end}: {counts[end]}", markeredgecolor="white", markeredgewidth=0.6)
        for end in _ENDS
        if counts[end]
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(7, len(handles)), fontsize=7.5, frameon=False,
        handlelength=1.2, columnspacing=1.3,
    )  # fmt: skip


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 300:
        return "seconds", 1.0
    if seconds < 3 * _HOUR:
        return "minutes", 60.0
    return ("hours", float(_HOUR)) if seconds < 3 * _DAY else ("days", float(_DAY))
