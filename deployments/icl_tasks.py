"""The picture of the seed experiment: how far the models of a sweep are from dMMSE and from ridge, by the number M of
tasks that they were trained on.

Reads the results of the sweep from the bucket, and may be asked while trials are still being trained. Distances are
mean square differences of predictions, divided by D; a point is the mean of the seeds, its bar goes from the least to
the greatest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu.connection import Connection, ConnectionSettingsError
from tpu.runs.drawing import to_png
from tpu.sweeps.steering import SweepNotFound, find_sweep

PARAMETER = "training.workload.tasks"
WHERE = {"pretraining": "on the tasks it was trained on", "new": "on new Gaussian tasks"}
# Figure of the evaluation, what it is called, colour, line.
LINES = (
    ("delta_dmmse", "Δ to dMMSE", "#dc5348", "-"),
    ("delta_ridge", "Δ to ridge", "#3b82f6", "-"),
    ("dmmse_to_ridge", "dMMSE to ridge", "#8b95a5", "--"),
)


def figures_by_tasks(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, list[float]]]:
    """From the results of a sweep: for each M each figure (such as `new.delta_ridge`) of all seeds that have it."""
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        tasks = row.get(PARAMETER)
        for name in (f"{where}.{figure}" for where in WHERE for figure, *_ in LINES):
            value = row.get(f"evaluation/{name}")
            if isinstance(tasks, int) and isinstance(value, int | float):
                found.setdefault(tasks, {}).setdefault(name, []).append(float(value))
    return dict(sorted(found.items()))


def draw(figures: Mapping[int, Mapping[str, Sequence[float]]], title: str, file: Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.2, 3.4), dpi=110, layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, (where, about) in zip(both, WHERE.items(), strict=True):
        for name, label, colour, line in LINES:
            known = [
                (tasks, of[f"{where}.{name}"]) for tasks, of in figures.items() if f"{where}.{name}" in of
            ]
            means = [sum(values) / len(values) for _, values in known]
            below = [mean - min(values) for mean, (_, values) in zip(means, known, strict=True)]
            above = [max(values) - mean for mean, (_, values) in zip(means, known, strict=True)]
            axes.errorbar(
                [tasks for tasks, _ in known], means, yerr=(below, above), label=label, color=colour, linestyle=line,
                marker="o" if line == "-" else "", markersize=4, linewidth=1.5, elinewidth=1, capsize=2,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tasks, _: f"{tasks:g}"))
        axes.set_yscale("log")
        axes.set_xlabel("M, number of pretraining tasks", fontsize=9)
        axes.set_title(about, fontsize=9)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(labelsize=8)
    both[0].set_ylabel("mean square distance by D", fontsize=9)
    both[1].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(to_png(figure))


def lines_of(figures: Mapping[int, Mapping[str, Sequence[float]]]) -> list[str]:
    """A line for each M, of new tasks."""
    lines = [f"{'M':>6}  {'seeds':>5}  {'Δ to dMMSE':>10}  {'Δ to ridge':>10}  nearer to"]
    for tasks, of in figures.items():
        dmmse, ridge = (sum(of[f"new.{n}"]) / len(of[f"new.{n}"]) for n in ("delta_dmmse", "delta_ridge"))
        seeds = len(of["new.delta_ridge"])
        nearer = "dMMSE" if dmmse < ridge else "ridge"
        lines.append(f"{tasks:>6}  {seeds:>5}  {dmmse:>10.4f}  {ridge:>10.4f}  {nearer}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.icl_tasks", description=__doc__)
    parser.add_argument("sweep", help="name of the sweep, such as icl-tasks-short")
    parser.add_argument("--into", type=Path, help="file of the picture (.relay/sweeps/SWEEP/icl-tasks.png)")
    arguments = parser.parse_args()
    try:
        sweep = find_sweep(Connection.from_environment().bucket, arguments.sweep)
    except (ConnectionSettingsError, SweepNotFound) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    figures = figures_by_tasks(sweep.book.results())
    if not figures:
        parser.exit(
            1, f"{parser.prog}: no trial of {arguments.sweep} that sweeps {PARAMETER} is evaluated yet\n"
        )
    file: Path = arguments.into or Path(".relay/sweeps") / arguments.sweep / "icl-tasks.png"
    draw(figures, f"{arguments.sweep}: what a transformer learns of M regression tasks", file)
    print("\n".join(lines_of(figures)))
    print(f"the picture is {file}")


if __name__ == "__main__":
    main()
