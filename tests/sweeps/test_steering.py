"""`relay sweep`: what it leaves in the bucket for whoever drives the sweep, and what it refuses."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.runs.terminal import Terminal
from tpu.emulator.emulator import Emulator
from tpu.runs.code import Bundle
from tpu.runs.controller import claim, this_process
from tpu.sweeps.book import SweepBook, sweep_directory
from tpu.sweeps.config import parse_sweep
from tpu.sweeps.outcome import Outcome
from tpu.sweeps.steering import Steered, find_sweep, who_hears
from tpu.sweeps.trial import Trial
from tpu.sweeps.wishes import WishBox, Wishes

RATE, WIDTH = "training.optimizer.learning_rate", "training.workload.model.width"
FILE = {
    "run": {"name": "mine", "training": {"workload": {"kind": "icl"}}, "slice": {"chips": 1}},
    "parameters": {RATE: {"values": [0.1, 0.2]}, WIDTH: {"value": 32}},
    "seeds": 2,
    "trials": 2,
}


@pytest.fixture
def terminal(emulator: Emulator, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture
def sweep(emulator: Emulator) -> Steered:
    """A sweep of which two trials have begun and one has ended; nobody drives it."""
    read = parse_sweep(FILE, "mine")
    bucket = emulator.env["TPU_RELAY_BUCKET"]
    book = SweepBook(sweep_directory(bucket, "mine"))
    book.open(read.run, read.search, Bundle(b"", "0" * 64, "working-tree"))
    for seed in (0, 1):
        book.begin(Trial(seed, 0, {RATE: 0.1, WIDTH: 32}, seed, f"mine-{seed}"))
    book.settle(book.trials()[0], Outcome("finished", value=0.5, step=1000))
    return find_sweep(bucket, "mine")


def test_a_trial_is_cancelled_by_its_number_or_its_run(terminal: Terminal, sweep: Steered):
    for word in ("1", "mine-1"):
        answer = terminal.relay("sweep", "cancel", "mine", word)
        assert (answer.code, answer.out.splitlines()[-1]) == (0, who_hears(sweep))
        assert f"trial 1, {RATE}=0.1, {WIDTH}=32, seed=1, is cancelled" in answer.out
    assert sweep.wishes.read().cancelled == (1,)


def test_points_runs_and_a_priority_are_added_to_what_is_there(terminal: Terminal, sweep: Steered):
    assert terminal.relay("sweep", "add", "mine", "--param", f"{RATE}=0.5", "--runs", "4").code == 0
    assert (
        terminal.relay("sweep", "add", "mine", "--param", f"{RATE}=0.6", "--param", f"{WIDTH}=64").code == 0
    )
    assert terminal.relay("sweep", "priority", "mine", "--", "-3").code == 0
    # A parameter that is the same in all trials need not be named; one of another value may be.
    added = ({RATE: 0.5, WIDTH: 32}, {RATE: 0.6, WIDTH: 64})
    assert sweep.wishes.read() == Wishes(priority=-3, runs=4, added=added)


def test_it_says_whether_somebody_hears(terminal: Terminal, sweep: Steered):
    assert "nobody drives the sweep" in terminal.relay("sweep", "priority", "mine", "1").out
    controller = claim(sweep.sweep_dir, this_process("x"), None)
    sweep.wishes.change(lambda wishes: replace(wishes, taken=True))
    assert "drives the sweep and hears it" in terminal.relay("sweep", "priority", "mine", "2").out
    controller.release()
    assert "nobody drives the sweep" in terminal.relay("sweep", "show", "mine").out


def test_show_lists_trials(terminal: Terminal, sweep: Steered):
    first, second, last = terminal.relay("sweep", "show", "mine").out.splitlines()
    assert first.split()[:6] == ["0", "mine-0", "finished", "step", "1000", "loss"]
    assert second.split()[:3] == ["1", "mine-1", "waiting"]
    assert last.startswith("2 trials have begun")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cancel", "mine", "0"], "trial 0 of mine has ended already: it is finished"),
        (["cancel", "mine", "7"], "there is no trial 7 in mine: trials 0 to 1 have begun"),
        (["priority", "mine", "2000"], "from -1000 to 1000"),
        (["add", "mine"], "say what to add"),
        (["add", "mine", "--runs", "2"], "has at most 2 runs already"),
        (["add", "mine", "--runs", "5"], "the grid of mine has 4 runs in all; add points of your own"),
        (["add", "mine", "--param", "lr=1"], "lr is no parameter of mine, which has training.optimizer"),
        (["add", "mine", "--param", f"{WIDTH}=8"], f"{RATE} is missing: give it, too"),
        (
            ["add", "mine", "--param", f"{RATE}=-1"],
            "such a trial cannot be: training.optimizer.learning_rate",
        ),
        (["add", "mine", "--param", f"{RATE}=0.1"], "trial 0 of mine has these parameters: mine-0"),
        (["show", "mime"], "there is no sweep mime in gs://"),
        (["stop", "other"], "there is mine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(
    terminal: Terminal, sweep: Steered, words: list[str], told: str
):
    answer = terminal.relay("sweep", *words)
    assert answer.code == 2
    assert told in answer.sentence
    assert sweep.wishes.read() == Wishes()


def test_the_same_point_is_added_once(terminal: Terminal, sweep: Steered):
    words = ("sweep", "add", "mine", "--param", f"{RATE}=0.7")
    assert terminal.relay(*words).code == 0
    assert "was added to mine already" in terminal.relay(*words).sentence


def test_wishes_of_many_at_once_are_all_kept_and_none_falls_between_two_looks(sweep: Steered):
    driver = sweep.wishes
    driver.change(lambda wishes: replace(wishes, taken=True))

    def wish(number: int) -> None:
        WishBox(sweep.sweep_dir).change(lambda w: replace(w, cancelled=tuple(sorted({*w.cancelled, number}))))

    threads = [threading.Thread(target=wish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The driver was about to leave; it has to look again first.
    assert not driver.give_back()
    assert driver.read() == Wishes(cancelled=tuple(range(8)), taken=True)
    assert driver.give_back()
    assert not sweep.wishes.read().taken
