"""Ctrl-C at a flow: patience where it works, and no false word where it is ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flows.signals import STILL_CLEANING_UP, patient_with_ctrl_c


@pytest.fixture
def disposed() -> Iterator[Callable[[Any], None]]:
    """Sets what SIGINT does, for this test."""
    before = signal.getsignal(signal.SIGINT)

    def dispose(handler: Any) -> None:
        signal.signal(signal.SIGINT, handler)

    yield dispose
    signal.signal(signal.SIGINT, before)


def press(times: int) -> list[str]:
    said: list[str] = []
    with patient_with_ctrl_c(said.append):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
    return said


def test_the_first_and_the_third_press_go_where_they_went_and_the_second_is_told(disposed):
    heard: list[int] = []
    disposed(lambda number, frame: heard.append(number))
    assert press(3) == [STILL_CLEANING_UP]
    assert heard == [signal.SIGINT, signal.SIGINT]


def test_a_process_of_a_background_shell_ignores_ctrl_c_and_does_not_say_that_it_cleans_up(disposed):
    disposed(signal.SIG_IGN)
    assert press(2) == []
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
