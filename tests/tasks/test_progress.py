from tasks.progress import LAST_LINES, LINES_A_SECOND, LINES_AT_ONCE, LineTap


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_program_usually_prints_comes_line_by_line():
    said: list[str] = []
    clock = Clock()
    tap = LineTap(said.append, clock)
    for number in range(3000):
        clock.now += 1 / LINES_A_SECOND
        assert not tap.line(f"line {number}")
    assert said == [f"line {number}" for number in range(3000)]


def test_of_a_flood_the_first_and_the_last_lines_come_and_how_many_are_left_out():
    said: list[str] = []
    clock = Clock()
    tap = LineTap(said.append, clock)
    held = [tap.line(f"line {number}") for number in range(100_000)]
    first = int(LINES_AT_ONCE)
    assert held == [False] * first + [True] * (100_000 - first)
    assert len(said) == first
    tap.ebb()
    assert said[first].startswith(f"… {100_000 - first - LAST_LINES:,} lines are left out")
    assert said[first + 1 :] == [f"line {number}" for number in range(100_000 - LAST_LINES, 100_000)]
    clock.now += 1
    assert not tap.line("after it")
    assert said[-1] == "after it"
    assert tap.line("more") is False
