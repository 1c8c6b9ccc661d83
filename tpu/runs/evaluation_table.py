"""Evaluations of checkpoints as Markdown: a column a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_COLUMNS = 8


def to_markdown(name: str, evaluations: Mapping[int, Mapping[str, Any]], failures: Mapping[int, str]) -> str:
    """All of them, and those that failed with their last words."""
    lines = [f"# Evaluation of {name}", ""]
    if evaluations:
        lines += [*table_lines(evaluations), ""]
    for step, why in sorted(failures.items()):
        quoted = "\n".join(f"    {line}" for line in why.splitlines())
        lines += [f"**Step {step} could not be evaluated:**", "", quoted, ""]
    return "\n".join(lines)


def table_lines(evaluations: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The last one's summary, and the numbers of as many of the steps as a page has room for."""
    flat = {step: _flat(figures) for step, figures in sorted(evaluations.items())}
    last = max(flat)
    shown = _evenly(list(flat), MOST_COLUMNS)
    lines = []
    if isinstance(told := flat[last].get("summary"), str):
        lines += [told, ""]
    lines += [
        "| | " + " | ".join(f"step {step}" for step in shown) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for name, value in flat[last].items():
        if isinstance(value, int | float) and name not in ("step", "attempt", "sequences"):
            cells = (f"{flat[step][name]:.4g}" if name in flat[step] else "" for step in shown)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _evenly(steps: list[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}: ")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
