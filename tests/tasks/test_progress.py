"""What of a run's output the Prefect server hears: all that is usual, and of a flood a bounded part."""

import pytest

from tasks.progress import LAST_LINES, OWN_SERVER, PREFECT_CLOUD, LineTap, Rates, Room


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_program_usually_prints_comes_line_by_line():
    said: list[str] = []
    clock = Clock()
    tap = LineTap(said.append, Room(OWN_SERVER, clock))
    for number in range(3000):
        clock.now += 1 / OWN_SERVER.lines_a_second
        assert not tap.line(f"line {number}")
    assert said == [f"line {number}" for number in range(3000)]


def test_of_a_flood_the_first_and_the_last_lines_come_and_how_many_are_left_out():
    said: list[str] = []
    clock = Clock()
    tap = LineTap(said.append, Room(OWN_SERVER, clock))
    held = [tap.line(f"line {number}") for number in range(100_000)]
    first = int(OWN_SERVER.lines_at_once)
    assert held == [False] * first + [True] * (100_000 - first)
    assert len(said) == first
    clock.now += tap.wait_s()
    tap.ebb()
    assert said[first].startswith(f"… {100_000 - first - LAST_LINES:,} lines are left out")
    assert said[first + 1 :] == [f"line {number}" for number in range(100_000 - LAST_LINES, 100_000)]
    clock.now += 1
    assert not tap.line("after it")
    assert said[-1] == "after it"
    assert tap.line("more") is False


@pytest.mark.parametrize("rates", [OWN_SERVER, PREFECT_CLOUD])
def test_all_hosts_together_never_say_more_than_the_server_takes(rates: Rates):
    said: list[str] = []
    clock = Clock()
    room = Room(rates, clock)
    taps = [LineTap(said.append, room) for _ in range(32)]
    hour = 3600.0
    while clock.now < hour:
        for tap in taps:
            for number in range(5):
                if tap.line(str(number)) and tap.wait_s() == 0:
                    tap.ebb()
        clock.now += 1
    assert 0.5 < len(said) / (rates.lines_at_once + hour * rates.lines_a_second) <= 1.0


def test_twenty_floods_at_once_are_less_than_the_smallest_account_takes():
    assert 20 * 60 * PREFECT_CLOUD.lines_a_second < 500
