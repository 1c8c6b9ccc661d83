import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from tests.runs.histories import at, attempt_ended, intended
from tpu.runs.config import parse_run_config
from tpu.runs.drawing import INK
from tpu.runs.record import RunRecord
from tpu.runs.report import (
    SegmentRow,
    attempts_of,
    draw,
    make_report,
    segment_rows,
    summary,
    to_markdown,
)


def attempt(number, resume, last, verdict="preempted", reason="why", reached=None):
    return {
        "attempt": number, "resume": resume, "last_commit": last, "verdict": verdict, "reason": reason,
        "reached": reached,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("attempts", "committed", "first_step", "expected"),
    [
        # (attempts, what ended them, committed) of each segment; segments end at 20, 40, 60.
        ([attempt(1, None, 60, "finished")], 60, 0, [((1,), 0, True), ((1,), 0, True), ((1,), 0, True)]),
        # Preempted in the second segment, after the first commit.
        (
            [attempt(1, None, 20), attempt(2, 20, 60, "finished")],
            60,
            0,
            [((1,), 0, True), ((1, 2), 1, True), ((2,), 0, True)],
        ),
        # Preempted before the first commit, twice.
        (
            [attempt(1, None, None), attempt(2, None, None), attempt(3, None, 60, "finished")],
            60,
            0,
            [((1, 2, 3), 2, True), ((3,), 0, True), ((3,), 0, True)],
        ),
        # A notice saved in the middle of a segment: both attempts trained in it.
        (
            [attempt(1, None, 33), attempt(2, 33, 60, "finished")],
            60,
            0,
            [((1,), 0, True), ((1, 2), 1, True), ((2,), 0, True)],
        ),
        # The run gave up in the second segment.
        ([attempt(1, None, 20, "user-failure")], 20, 0, [((1,), 0, True), ((1,), 1, False), ((), 0, False)]),
        # A fork of step 20: its segments begin there.
        ([attempt(1, 20, 60, "finished")], 60, 20, [((1,), 0, True), ((1,), 0, True)]),
        (
            [attempt(1, 20, None), attempt(2, 20, 60, "finished")],
            60,
            20,
            [((1, 2), 1, True), ((2,), 0, True)],
        ),
        # Extended after it had finished at 40.
        (
            [attempt(1, None, 40, "finished"), attempt(2, 40, 60, "finished")],
            60,
            0,
            [((1,), 0, True), ((1,), 0, True), ((2,), 0, True)],
        ),
        ([], 0, 0, [((), 0, False)] * 3),
    ],
)
def test_which_attempt_trained_in_which_segment(attempts, committed, first_step, expected):
    segments = [stop for stop in (20, 40, 60) if stop > first_step]
    rows = segment_rows(segments, attempts, committed, first_step)
    assert [(row.attempts, len(row.ends), row.committed) for row in rows] == expected
    assert rows[0].start == first_step
    assert [row.stop for row in rows] == segments


def test_a_row_says_who_ended_and_why():
    rows = segment_rows((20, 40), [attempt(1, None, 20, reason="gone"), attempt(2, 20, 40, "finished")], 40)
    assert rows[1] == SegmentRow(2, 20, 40, (1, 2), ("1: preempted",), True)


def events(price=3.6):
    return [
        intended(0.0, "a", price),
        at(10.0, "slice-ready", slice="a"),
        at(11.0, "attempt-started", attempt=1, slice="a", resume=None),
        attempt_ended(110.0, 1, "a", reason="a | b\nc", last_commit=20, phases=[(11.0, "step")], waste_from=100.0,
                      evidence=["cloud: lost: gone", "w0: silent"], commits=[(100.0, 20)]),
        at(110.0, "slice-deleted", slice="a"),
        intended(111.0, "b", price),
        attempt_ended(112.0, None, "b", reached=None),
        at(120.0, "slice-ready", slice="b"),
        at(121.0, "attempt-started", attempt=2, slice="b", resume=20),
        attempt_ended(170.0, 2, "b", verdict="finished", last_commit=40, phases=[(121.0, "step")]),
    ]  # fmt: skip


def test_a_failure_for_which_a_slice_is_to_blame_is_told_so():
    history = [
        attempt_ended(110.0, 1, "a", verdict="user failure", reason="w0: exit code 1", evidence=["w0: exit code 1"]),
        attempt_ended(120.0, 2, "b", verdict="user failure", reason="w0: exit code 2", evidence=["w0: exit code 2"]),
        at(121.0, "slice-blamed", slice="a", why="r failed on it, and got further on another slice"),
    ]  # fmt: skip
    made = make_report(record(), history, 0, None, {}, (), "user failure", 200.0, mixed=False)
    lines = [line for line in to_markdown(made, {}).splitlines() if line.startswith("- attempt")]
    assert [("not charged" in line, line[:14]) for line in lines] == [
        (True, "- attempt 1 on"),
        (False, "- attempt 2 on"),
    ]


def test_what_ended_before_it_had_a_gang_is_no_attempt():
    assert [one["attempt"] for one in attempts_of(events())] == [1, 2]
    assert attempts_of(events())[1]["resume"] == 20


def record(**values) -> RunRecord:
    config = parse_run_config(
        {"name": "r", "training": {"workload": {"kind": "icl"}}, "steps": 40, "checkpoints": {"every": 20}}
    )
    return dataclasses.replace(
        RunRecord(config, None, {"source": "tree", "sha256": "ab" * 32}, 0.0), **values
    )


def report_of(made=None, failure=None, losses=(), evaluations=None, price=3.6):
    return make_report(
        made or record(), events(price), 40, "cd" * 32, evaluations or {}, losses, failure, 200.0, mixed=False
    )


def test_the_report_in_markdown():
    evaluations = {20: {"step": 20, "icl": {"model": 0.5}}, 40: {"step": 40, "icl": {"model": 0.25}}}
    text = to_markdown(report_of(evaluations=evaluations), {"loss": "loss.png", "timeline": "timeline.png"})
    assert text.startswith("# Run r: finished\n")
    assert f"| parameters (sha256) | `{'cd' * 32}` |" in text
    assert "| 1 | 0–20 | 1 | $0.0900 | done |" in text
    assert r"| 2 | 20–40 | 1, 2 | $0.0900 | attempt 1: preempted |" in text
    assert "| | step 20 | step 40 |" in text
    assert "| icl: model | 0.5 | 0.25 |" in text
    assert "![loss by step](loss.png)" in text
    assert "![slices over time](timeline.png)" in text
    assert "| **wall time** | **200.0** | | **$0.1800** |" in text
    assert "| spot v4-8 in us-central2-b | 2 | 180 s | $3.60 | $0.1800 |" in text
    assert "| cost | $0.1800 |" in text
    assert "- attempt 1 on a: **preempted**, a \\| b c\n  - cloud: lost: gone\n  - w0: silent" in text
    assert "forked" not in text
    assert "extended" not in text


def test_a_foreign_command_has_attempts_and_no_steps():
    config = parse_run_config({"name": "r", "command": "python own.py", "evaluate": "never"})
    foreign = dataclasses.replace(record(), config=config)
    report = make_report(foreign, events(), 0, None, {}, (), "failed: why", 200.0, mixed=False)
    text = to_markdown(report, {})
    assert "| command | `python own.py` |" in text
    assert "| attempts | 2 |" in text
    assert "| 1 | preempted |" in text
    assert r"- attempt 1 on a: **preempted**, a \| b c" in text
    assert "| **wall time** | **200.0** | |" in text
    for word in ("parameters", "goodput", "steps", "Segments", str(config.steps)):
        assert word not in text.replace(foreign.hash, "")


def test_seconds_sum_to_the_wall_time_and_goodput_leaves_waste_out():
    report = report_of()
    assert sum(report.seconds.values()) == pytest.approx(200.0)
    assert report.seconds["wasted"] == pytest.approx(10.0)
    assert report.goodput == pytest.approx((89 + 49) / 200)


def test_a_price_that_nobody_set_is_said():
    text = to_markdown(report_of(price=None), {})
    assert "| cost | price not set (180 s of spot v4-8 in us-central2-b): set slice.price_an_hour |" in text
    assert "| spot v4-8 in us-central2-b | 2 | 180 s | not set | not known |" in text
    assert "$" not in text
    assert "| **wall time** | **200.0** | |\n" in text


def test_columns_of_dollars_add_up_to_what_is_shown_as_their_sum():
    def shown(text, heading, column):
        rows = text.partition(f"## {heading}")[2].partition("\n\n#")[0].splitlines()[4:]
        cells = [row.split(" | ")[column].strip("| ") for row in rows if "**" not in row]
        return sum(round(float(cell.strip("$")) * 10000) for cell in cells if cell != "–")

    text = to_markdown(report_of(price=7.77), {})
    total = round(7.77 * 180 / 3600 * 10000)
    assert shown(text, "Segments", 3) == shown(text, "Where the time went", 3) == total
    assert shown(text, "What it cost", 4) == total


def test_traffic_between_regions_is_a_line_of_the_cost():
    moved = at(165.0, "egress", what="checkpoints between the bucket and us-east5", dollars=0.25)
    report = make_report(record(), [*events(), moved], 40, None, {}, (), None, 200.0, mixed=False)
    text = to_markdown(report, {})
    assert "| egress: checkpoints between the bucket and us-east5 | | | | $0.2500 |" in text
    assert "| **all** | | | | **$0.4300** |" in text
    assert "| cost | $0.4300 |" in text


def test_a_fork_and_an_extension_name_where_they_come_from():
    parent = {"run": "older", "step": 20, "hash": "ef" * 32}
    text = to_markdown(report_of(record(parent=parent, extensions=((30, 40),))), {})
    assert "| forked from | older at step 20 |" in text
    assert "| extended | from 30 to 40 steps |" in text
    assert "| 1 | 20–" in text
    assert "Loss" not in text


def test_a_failure_is_said_below_the_headline_in_one_line():
    text = to_markdown(report_of(failure="failed: user failure, RuntimeError\nTraceback"), {})
    assert text.splitlines()[:3] == ["# Run r: failed", "", "user failure, RuntimeError."]


def test_the_report_in_a_line():
    assert summary(report_of()) == "finished, 2 attempts, goodput 69% of 200 s, cost $0.1800"


def test_the_pictures_are_there_if_there_is_something_to_show():
    assert list(draw(report_of())) == ["timeline"]
    pictures = draw(report_of(losses=[(1, 2.0), (2, 1.0)]))
    assert list(pictures) == ["loss", "timeline"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())


WHITE, DARK = np.array([255.0, 255.0, 255.0]), np.array([21.0, 21.0, 28.0])  # pages of the Prefect UI


def luminance(colours: np.ndarray) -> np.ndarray:
    """As WCAG 2 defines it, of 8-bit sRGB."""
    part = colours / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(colours: np.ndarray, page: np.ndarray) -> np.ndarray:
    light, dark = luminance(colours), luminance(page)
    return (np.maximum(light, dark) + 0.05) / (np.minimum(light, dark) + 0.05)


@pytest.mark.parametrize("name", ["loss", "timeline"])
def test_a_picture_is_read_on_a_light_page_and_on_a_dark_one(name: str):
    picture = draw(report_of(losses=[(1, 2.0), (2, 1.0)]))[name]
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGBA")).reshape(-1, 4).astype(float)
    solid = pixels[pixels[:, 3] == 255][:, :3]
    # No sheet of paper: what is drawn is the smaller part, and is seen on either page.
    assert 0 < len(solid) < len(pixels) / 2
    for page in (WHITE, DARK):
        assert np.percentile(contrast(solid, page), 2) > 1.4
        letters = np.array([int(INK[at : at + 2], 16) for at in (1, 3, 5)], float)
        assert contrast(letters, page) > 3.5
