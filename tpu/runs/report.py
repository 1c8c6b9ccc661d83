"""The report of a run: pure functions from its events, metrics and evaluations to figures and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpu.money import dollar_column, in_dollars
from tpu.runs.code import short_source
from tpu.runs.config import Elastic, RunConfig
from tpu.runs.drawing import to_png
from tpu.runs.evaluation_table import table_lines
from tpu.runs.event_log import RunEvent
from tpu.runs.goodput import BUCKETS, Bucket, partition, run_intervals
from tpu.runs.ledger import Holding, Ledger, make_ledger
from tpu.runs.record import RunRecord
from tpu.runs.timeline import Timeline, make_timeline, timeline_picture
from tpu.slices.names import hosts_in_short

# A table that is wider than this is not read.
# Of so many attempts that ended early the evidence is shown, the newest.
MOST_EVIDENCE = 8


@dataclass(frozen=True)
class SegmentRow:
    """One segment: `attempts` that trained in it, and the verdict on each that ended there."""

    number: int
    start: int
    stop: int
    attempts: tuple[int, ...]
    ends: tuple[str, ...]
    committed: bool


@dataclass(frozen=True)
class Report:
    """Everything a report shows. Times in seconds, money in US dollars."""

    record: RunRecord
    verdict: str
    parameters_sha256: str | None
    segments: tuple[SegmentRow, ...]
    seconds: Mapping[Bucket, float]
    attempts: tuple[Mapping[str, Any], ...]
    evaluations: Mapping[int, Mapping[str, Any]]
    losses: Sequence[tuple[int, float]]
    ledger: Ledger
    timeline: Timeline
    mixed: bool
    graphs: str | None = None

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Productive step time over wall time."""
        return self.seconds["step"] / self.wall_s if self.wall_s else 0.0


def segment_rows(
    segments: Sequence[int], attempts: Sequence[Mapping[str, Any]], committed: int, first_step: int = 0
) -> tuple[SegmentRow, ...]:
    """Which attempt trained in which segment: from the step it resumed at to the step it reached."""
    rows = []
    for number, (start, stop) in enumerate(zip((first_step, *segments), segments, strict=False), 1):
        there, ends = [], []
        for attempt in attempts:
            begin = attempt["resume"] or 0
            end = max(attempt["last_commit"] or begin, begin)
            finished = attempt["verdict"] == "finished"
            # An attempt that ended between two commits died in the segment behind its last one.
            if begin < stop and (end > start or (not finished and end >= start and end < stop)):
                there.append(attempt["attempt"])
                if not finished and start <= end < stop:
                    ends.append(f"{attempt['attempt']}: {attempt['verdict']}")
        rows.append(SegmentRow(number, start, stop, tuple(there), tuple(ends), stop <= committed))
    return tuple(rows)


def attempts_of(events: Sequence[RunEvent]) -> tuple[Mapping[str, Any], ...]:
    """One mapping an attempt with a gang: how it started joined with how it ended."""
    started = {e.detail["attempt"]: e.detail for e in events if e.kind == "attempt-started"}
    blamed = {e.detail["slice"] for e in events if e.kind == "slice-blamed"}
    return tuple(
        {
            **started.get(e.detail["attempt"], {"resume": None}),
            **e.detail,
            "slice_to_blame": e.detail["verdict"] == "user failure" and e.detail["slice"] in blamed,
        }
        for e in events
        if e.kind == "attempt-ended" and e.detail["attempt"] is not None
    )


def make_report(
    record: RunRecord,
    events: Sequence[RunEvent],
    committed: int,
    parameters_sha256: str | None,
    evaluations: Mapping[int, Mapping[str, Any]],
    losses: Sequence[tuple[int, float]],
    failure: str | None,
    now: float,
    mixed: bool,
    graphs: str | None = None,
) -> Report:
    """Join what is known of a run into its report."""
    attempts = attempts_of(events)
    begin = events[0].time if events else now
    return Report(
        record=record,
        verdict=failure or "finished",
        parameters_sha256=parameters_sha256,
        segments=segment_rows(record.segments, attempts, committed, record.first_step),
        seconds=partition(run_intervals(events), begin, now),
        attempts=attempts,
        evaluations=evaluations,
        losses=losses,
        ledger=make_ledger(events, record.segments, now),
        timeline=make_timeline(events, now),
        mixed=mixed,
        graphs=graphs,
    )


def graphs_told(events: Iterable[tuple[int, Mapping[str, Any]]]) -> str | None:
    """What the attempts' `graphs` events say in sum; None if there are none (they are PyTorch/XLA's)."""
    last = {attempt: event for attempt, event in events if event["event"] == "graphs"}
    if not last:
        return None
    again = sum(event["recompiled"] for event in last.values())
    most = max(event["compiled"] for event in last.values())
    fallen = sorted({name for event in last.values() for name in event["fallbacks"]})
    where = f"on the CPU: {', '.join(fallen)}" if fallen else "none on the CPU"
    return f"at most {most} compiled an attempt, {again} after its first call; operators {where}"


def to_markdown(report: Report, pictures: Mapping[str, str], links: Mapping[str, str] | None = None) -> str:
    """The report as Markdown; `pictures` are URLs of those of `draw`, `links` those of tpu.runs.links."""
    outcome, _, why = report.verdict.splitlines()[0].partition(": ")
    lines = [f"# Run {report.record.config.name}: {outcome}", ""]
    lines += [f"{why.rstrip('.')}.", ""] if why else []
    first, *facts = [f"| {name} | {value} |" for name, value in _facts(report)]
    lines += [first, "| --- | --- |", *facts, ""]
    if url := pictures.get("timeline"):
        lines += ["## Timeline", "", f"![slices over time]({url})", ""]
    lines += _segment_lines(report) if report.record.config.commits else _attempt_lines(report)
    lines += ["", *_evaluation_lines(report), *_time_lines(report), *_cost_lines(report), *_evidence(report)]
    if url := pictures.get("loss"):
        lines += ["## Loss", "", f"![loss by step]({url})", ""]
    if links:
        lines += _file_lines(report, links)
    return "\n".join(lines)


def summary(report: Report) -> str:
    """The report in a line: how it ended, and what that took."""
    told = [
        report.verdict.splitlines()[0],
        f"{len(report.attempts)} attempt{'' if len(report.attempts) == 1 else 's'}",
    ]
    if report.record.config.commits:
        told.append(f"goodput {report.goodput:.0%} of {report.wall_s:.0f} s")
    return ", ".join([*told, f"cost {cost_text(report.ledger, report.record.config.max_cost)}"])


def draw(report: Report) -> dict[str, bytes]:
    """The report's pictures as PNG, by name; those of which there is nothing to show are left out."""
    config = report.record.config
    made = {
        "loss": loss_picture(report),
        "timeline": timeline_picture(
            report.timeline, f"{config.name}: what each slice was doing", partial(bucket_name, config)
        ),
    }
    return {name: picture for name, picture in made.items() if picture}


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    record = report.record
    config = record.config
    # Of a foreign command neither steps nor checkpoints are known, so there is no goodput to tell.
    if config.commits:
        digest = report.parameters_sha256
        yield "parameters (sha256)", f"`{digest}`" if digest else "none committed"
    else:
        yield "command", f"`{_cell(' '.join(config.command or ()))}`"
    yield "configuration (sha256)", f"`{record.hash}`"
    yield "code", f"{short_source(record.code['source'])}, sha256 `{record.code['sha256'][:16]}…`"
    yield "slice", ", else ".join(map(str, config.slice.choices))
    if config.mode is not None:
        units = (config.elastic or Elastic()).units
        yield "slices", f"{config.slices}, mode {config.mode}, {units} work units a step"
    yield "attempts", f"{len(report.attempts)}"
    if config.commits:
        yield "goodput", f"{report.goodput:.0%} of {report.wall_s:.0f} s"
    yield "cost", cost_text(report.ledger, config.max_cost)
    if record.parent:
        yield "forked from", f"{record.parent['run']} at step {record.parent['step']}"
    for before, to in record.extensions:
        yield "extended", f"from {before} to {to} steps"
    if report.graphs:
        yield "graphs", report.graphs
    if report.mixed:
        yield "mixed", "parts of this run were computed on different chips or library versions"


def cost_text(ledger: Ledger, max_cost: float | None = None) -> str:
    """What was spent, in words; a price that nobody set is said."""
    unpriced = " and ".join(f"{_hours(s)} of {what}" for what, s in ledger.unpriced_s.items())
    if ledger.dollars is None:
        return f"price not set ({unpriced}): set slice.price_an_hour"
    told = in_dollars(ledger.dollars) + (f" of {in_dollars(max_cost)} (max_cost)" if max_cost else "")
    return f"{told}, and {unpriced} whose price is not set" if unpriced else told


def _hours(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


def _segment_lines(report: Report) -> list[str]:
    spent = report.ledger.by(lambda charge: charge.segment)
    head, rule = ("| cost ", "| ---: ") if spent else ("", "")
    cost = dict(zip(spent, dollar_column(list(spent.values())), strict=True))
    lines = [
        "## Segments",
        "",
        f"| segment | steps | attempts {head}| what happened |",
        f"| --- | --- | --- {rule}| --- |",
    ]
    for row in report.segments:
        told = "<br>".join(f"attempt {_cell(end)}" for end in row.ends)
        if not row.committed:
            told = told or "not reached"
        tried = ", ".join(map(str, row.attempts)) or "–"
        paid = f"| {cost.get(row.number, '–')} " if spent else ""
        lines.append(f"| {row.number} | {row.start}–{row.stop} | {tried} {paid}| {told or 'done'} |")
    return lines


def _attempt_lines(report: Report) -> list[str]:
    lines = ["## Attempts", "", "| attempt | what happened |", "| --- | --- |"]
    for attempt in report.attempts:
        lines.append(f"| {attempt['attempt']} | {attempt['verdict']} |")
    return lines


def _time_lines(report: Report) -> list[str]:
    spent = report.ledger.by(lambda charge: charge.bucket)
    head, rule = (" cost |", " ---: |") if spent else ("", "")
    cost = dict(zip(spent, dollar_column(list(spent.values())), strict=True))
    lines = ["## Where the time went", "", f"| | seconds | share |{head}", f"| --- | ---: | ---: |{rule}"]
    for bucket in BUCKETS:
        if (seconds := report.seconds[bucket]) >= 0.05:  # what would be shown as 0.0
            paid = f" {cost.get(bucket, '–')} |" if spent else ""
            name = bucket_name(report.record.config, bucket)
            lines.append(f"| {name} | {seconds:.1f} | {seconds / report.wall_s:.0%} |{paid}")
    total = f" **{in_dollars(sum(spent.values()))}** |" if spent else ""
    return [*lines, f"| **wall time** | **{report.wall_s:.1f}** | |{total}", ""]


def bucket_name(config: RunConfig, bucket: Bucket) -> str:
    """As people read it. A foreign command says nothing of its phases: all its time is that of its start."""
    return "command" if bucket == "start" and not config.commits else bucket


def _cost_lines(report: Report) -> list[str]:
    """A line for each kind of slice that was held, and for what was moved between regions."""
    kinds: dict[tuple[str, float | None], list[Holding]] = {}
    for one in report.ledger.holdings:
        kinds.setdefault((one.candidate, one.price_an_hour), []).append(one)
    if not kinds and not report.ledger.egress:
        return []
    lines = [
        "## What it cost",
        "",
        "| slices | how many | time | an hour | cost |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    sums = [sum(one.dollars(one.chip_us) or 0.0 for one in held) for held in kinds.values()]
    shown = dollar_column([*sums, *report.ledger.egress.values()])
    for ((candidate, price), held), dollars in zip(kinds.items(), shown, strict=False):
        seconds = sum(one.chip_us / one.of for one in held) / 1e6
        count = len({one.slice for one in held})
        paid = ("not set", "not known") if price is None else (in_dollars(price), dollars)
        lines.append(f"| {candidate} | {count} | {_hours(seconds)} | {paid[0]} | {paid[1]} |")
    for what, dollars in zip(report.ledger.egress, shown[len(kinds) :], strict=True):
        lines.append(f"| egress: {_cell(what)} | | | | {dollars} |")
    if report.ledger.dollars is not None:
        lines.append(f"| **all** | | | | **{in_dollars(report.ledger.dollars)}** |")
    return [*lines, ""]


def _evidence(report: Report) -> list[str]:
    """Why attempts ended early, and what the verdicts rest on."""
    early = [one for one in report.attempts if one["verdict"] != "finished"]
    if not early:
        return []
    lines = ["## Why attempts ended", ""]
    for one in early[-MOST_EVIDENCE:]:
        reason, *evidence = (
            _cell(hosts_in_short(text, one["slice"])) for text in (one["reason"], *one["evidence"])
        )
        told = f"- attempt {one['attempt']} on {one['slice']}: **{one['verdict']}**, {reason}"
        if one["slice_to_blame"]:
            told += "; not charged: the program got further elsewhere, so this slice is to blame"
        lines += [told, *(f"  - {line}" for line in evidence)]
    if len(early) > MOST_EVIDENCE:
        lines.append(f"- and {len(early) - MOST_EVIDENCE} before, in the run's events")
    return [*lines, ""]


def _evaluation_lines(report: Report) -> list[str]:
    if not report.evaluations:
        return []
    return ["## Evaluation", "", *table_lines(report.evaluations), ""]


def _file_lines(report: Report, links: Mapping[str, str]) -> list[str]:
    """Where checkpoints, metrics and logs are: in a browser, and by command."""
    config = report.record.config
    name = config.name
    committed = max((row.stop for row in report.segments if row.committed), default=None)
    lines = ["## Files", ""]
    if config.commits:
        export = (
            f"`relay export {name}@{committed}` writes one as plain safetensors" if committed else "none yet"
        )
        lines += [
            f"- [checkpoints]({links['checkpoints']}): {export}",
            f"- [metrics]({links['metrics']}): JSON lines, losses by step",
        ]
    lines += [
        f"- [logs]({links['logs']}) of the program: `relay logs {name}` prints them",
        f"- [report]({links['report']}), with its figures as JSON: `relay show {name}`",
    ]
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:300]


def loss_picture(report: Report) -> bytes | None:
    """The loss curve as PNG, starts of attempts marked; None if no loss was logged."""
    if not report.losses:
        return None
    from matplotlib.figure import Figure  # slow to import, and only wanted here

    figure = Figure(figsize=(7, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report.losses, strict=True), linewidth=1.2, color="#3b82f6")
    for attempt in report.attempts:
        if attempt["resume"]:
            axes.axvline(attempt["resume"], color="#dc5348", linewidth=0.9, linestyle="--")
    axes.set(
        xlabel="step",
        ylabel="loss",
        title=f"{report.record.config.name} (dashed: resumed after an attempt ended)",
    )
    axes.grid(alpha=0.25)
    return to_png(figure)
