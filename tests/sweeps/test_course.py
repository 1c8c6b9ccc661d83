"""What a trial reports on its way, and how it is ended early."""

from __future__ import annotations

import asyncio

import pytest

from tpu.sweeps.course import Course, TrialPruned
from tpu.sweeps.metric import Metric


async def test_a_border_has_the_value_of_the_last_step_before_it_whatever_was_heard_since():
    reports: list[tuple[int, float]] = []
    course = Course(Metric(), lambda step, value: reports.append((step, value)))
    course.borders = (10, 20)
    for step in range(2, 14, 2):
        course.logged(step, 100 - step)
    course.committed(10)  # the save was slower than the steps behind it
    course.committed(13)  # by a preemption notice: no other trial is judged there
    course.resumed(13)
    course.logged(14, 1.0)
    course.committed(20)
    assert reports == [(10, 90.0), (20, 1.0)]


async def test_steps_that_are_made_again_count_once():
    reports: list[tuple[int, float]] = []
    course = Course(Metric(value="min"), lambda step, value: reports.append((step, value)))
    course.borders = (10,)
    course.logged(4, 5.0)
    course.logged(8, 0.0)
    course.resumed(4)
    course.logged(8, 3.0)
    course.committed(10)
    assert reports == [(10, 3.0)]


async def test_of_a_program_without_checkpoints_each_value_is_a_border():
    reports: list[tuple[int, float]] = []
    course = Course(Metric(), lambda step, value: reports.append((step, value)))
    course.borders = None
    for step, value in ((100, 3.0), (200, True), (300, "two"), (400, 1)):
        course.logged(step, value)
    assert reports == [(1, 3.0), (2, 1.0)]


async def test_the_word_that_ends_a_trial_cancels_its_work_and_waits_for_that():
    course = Course(Metric(), lambda *_: None)
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        try:
            course.end(TrialPruned("too slow"))
            course.end(TrialPruned("only the first word counts"))
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned_up = True
            raise

    with pytest.raises(TrialPruned, match="too slow"):
        await course.along(work())
    assert cleaned_up


async def test_work_that_is_done_or_fails_is_not_ended_early():
    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    await Course(Metric(), lambda *_: None).along(work(None))
    with pytest.raises(KeyError):
        await Course(Metric(), lambda *_: None).along(work(KeyError()))
