"""The report of a sweep: what a person learns from it, and that it stays a page however many trials there are."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from tests.runs.histories import at, leased
from tests.sweeps.boards import BEGAN, RATE, board_of, lives_of
from tpu.sweeps.board import Board, Live
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.pictures import MOST_LINES, Sight, draw, parameters_picture
from tpu.sweeps.report import MOST_REASONS, MOST_ROWS, headline, to_markdown

NOW = BEGAN + 3600
ALL = ["parameters", "metric", "fleet", "cost"]


def sight_of(board: Board) -> Sight:
    best = board.best()
    number = best[0].number if best else None
    return Sight("many", board.metric, board.goal, board.standings(NOW), number, lives_of(board, NOW), NOW)


def page_of(board: Board, pictures: dict[str, str]) -> str:
    return to_markdown(sight_of(board), headline(board), pictures, "gs://bucket/sweeps/many")


def test_a_small_sweep_shows_each_trial_with_its_chip_and_its_cost():
    board = board_of(12)
    page = page_of(board, {name: f"{name}.png" for name in ALL})
    best = board.best()
    assert best is not None
    assert f"| best so far | loss **{best[1]:.6g}** of trial {best[0].number} (" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "learning_rate=" in line]
    assert len(rows) == 1 + 12
    assert "| finished | 490 |" in page
    assert "| 1 | $0.0356 | slice-0 chip 1 |" in page
    assert "trial 7, many-00000007: **failed**, exit code 3" in page
    assert [page.index(f"({name}.png)") for name in ALL] == sorted(
        page.index(f"({name}.png)") for name in ALL
    )


def test_two_thousand_trials_are_one_page_that_says_how_many_it_shows():
    board = board_of(2000, slices=100)
    sight = sight_of(board)
    pictures = draw(sight)
    assert list(pictures) == ALL
    page = page_of(board, {name: f"{name}.png" for name in ALL})
    assert sum(map(len, pictures.values())) * 4 / 3 + len(page) < 300_000
    assert f"## Trials: the best {MOST_ROWS} of 2,000" in page
    early = board.count("failed", "pruned")
    assert f"- and {early - MOST_REASONS:,} more, with their reasons in the results" in page
    assert MOST_LINES < 2000


def test_pictures_have_no_background_so_that_they_are_read_on_any_page():
    for picture in draw(sight_of(board_of(12))).values():
        with Image.open(io.BytesIO(picture)) as image:
            corner = image.convert("RGBA").getpixel((0, 0))
            assert isinstance(corner, tuple)
            assert corner[3] == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_sweep_that_has_hardly_begun_has_a_page(number: int):
    board = board_of(12)
    for one in list(board.began)[number:]:
        board.began.pop(one)
        board.ended.pop(one, None)
        board.live.pop(one, None)
    sight = sight_of(board)
    assert page_of(board, {name: name for name in draw(sight)}).startswith("# Sweep many\n")


def test_values_that_cannot_be_drawn_are_left_out():
    board = board_of(12, price=None)
    for number in (0, 1):
        board.ended[number] = replace(board.ended[number], value=float("nan"), curve=((1, float("inf")),))
    board.ended[2] = Outcome("failed", reason="it never began")
    board.began[3] = replace(board.began[3], parameters={RATE: None, "list": [1, 2], "flag": True})
    board.live[11] = Live()
    assert list(draw(sight_of(board))) == ALL
    assert "cost of all trials | not known: set slice.price_an_hour" in page_of(board, {})


def test_a_metric_that_is_known_at_the_end_is_drawn_beside_the_loss():
    board = board_of(12)
    board.metric = "evaluation/new.delta_ridge"
    board.live[11].value = None
    page = page_of(board, {name: name for name in draw(sight_of(board))})
    assert "| best so far | evaluation/new.delta_ridge **" in page
    assert all(f"({name})" in page for name in ALL)


def test_seeds_are_the_axis_of_a_sweep_without_parameters():
    board = board_of(12)
    board.began = {number: replace(trial, parameters={}) for number, trial in board.began.items()}
    assert parameters_picture(sight_of(board)) is not None


def test_a_trial_that_runs_says_which_vm_and_chip_it_has():
    board = board_of(12)
    events = [
        leased(NOW - 60, "slice-1", [2]),
        at(NOW - 50, "attempt-started", attempt=1, slice="slice-1", resume=None),
    ]
    board.live[11] = Live(70, 0.4, "slice-1-w0", events=events)
    row = board.rows(NOW)[11]
    assert (row["where"], row["state"], row["step"]) == ("slice-1-w0 chip 2", "running", 70)
    assert row["attempts"] == 1
    assert row["dollars"] == pytest.approx(3.6 / 60 / 4)
    assert row["chip_hours"] == pytest.approx(1 / 60, abs=1e-6)
