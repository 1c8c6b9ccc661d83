"""The picture of the seed experiment, from the results of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from deployments.icl_tasks import PARAMETER, draw, figures_by_tasks, lines_of
from tpu.sweeps.config import load_sweep

SWEEPS = Path(__file__).parents[2] / "deployments/sweeps"


def row(tasks: int, seed: int, dmmse: float, ridge: float) -> dict[str, Any]:
    figures = {"delta_dmmse": dmmse, "delta_ridge": ridge, "dmmse_to_ridge": 0.5}
    return {PARAMETER: tasks, "seed": seed, "state": "finished"} | {
        f"evaluation/{where}.{name}": value + 0.01 * seed
        for where in ("pretraining", "new")
        for name, value in figures.items()
    }


def test_small_m_is_nearer_to_dmmse_and_large_m_to_ridge(tmp_path: Path):
    rows = [row(256, seed, 0.3, 0.1) for seed in (0, 1, 2)] + [row(1, seed, 0.01, 2.0) for seed in (0, 1)]
    rows.append({PARAMETER: 4, "state": "running"})  # not evaluated yet
    figures = figures_by_tasks(rows)
    assert list(figures) == [1, 256]
    assert figures[1]["new.delta_ridge"] == [2.0, 2.01]
    assert [line.split() for line in lines_of(figures)[1:]] == [
        ["1", "2", "0.0150", "2.0050", "dMMSE"], ["256", "3", "0.3100", "0.1100", "ridge"]
    ]  # fmt: skip
    draw(figures, "a sweep", tmp_path / "made" / "picture.png")
    with Image.open(tmp_path / "made" / "picture.png") as picture:
        assert picture.size == (902, 374)


def test_both_forms_go_over_powers_of_two_with_three_seeds():
    for name in ("icl-tasks", "icl-tasks-short"):
        search = load_sweep(SWEEPS / f"{name}.yaml").search
        values = search.parameters[PARAMETER].choices
        assert values is not None
        assert all(value & (value - 1) == 0 for value in values)
        assert len(search.seeds) == 3
