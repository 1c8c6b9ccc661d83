"""When a trial is stopped early, by what, and which settings could never stop one."""

from __future__ import annotations

import random

import pytest

from tpu.sweeps.metric import Metric
from tpu.sweeps.pruner import Pruner, PrunerError, of_wandb
from tpu.sweeps.pruning import Judge

LOSS, ACCURACY = Metric(), Metric(name="accuracy", goal="maximize")


def judge(metric: Metric = LOSS, **pruner: object) -> Judge:
    return Judge(Pruner.model_validate(pruner), "s", metric)


def test_median_stops_what_is_worse_than_half_of_those_that_finished_at_the_same_step():
    made = judge(type="median", n_startup_trials=3, n_warmup_steps=20)
    for number, loss in enumerate((1.0, 2.0, 3.0)):
        made.begin(number)
        assert [made.hear(number, step, loss) for step in (10, 20, 30)] == [None] * 3  # nobody has finished
    for number in range(3):
        made.end(number, "finished")
    for number in range(3, 6):
        made.begin(number)
    assert made.hear(3, 10, 9.0) is None  # before the warm-up is over
    assert made.hear(3, 20, 2.5) == (
        "median: loss 2.5, the best up to step 20, is worse than 2, the median of 3 finished trial(s) there"
    )
    assert made.hear(4, 20, 1.5) is None
    assert made.hear(5, 20, float("nan")) == "median: loss nan at step 20 is no number"


def test_a_trial_that_failed_or_was_pruned_is_not_part_of_the_median():
    made = judge(type="median", n_startup_trials=1)
    for number, (loss, state) in enumerate(
        [(9.0, "finished"), (0.1, "failed"), (0.1, "pruned"), (5.0, None)]
    ):
        made.begin(number)
        made.hear(number, 10, loss)
        if state is not None:
            made.end(number, state)  # type: ignore[arg-type]
    made.begin(4)
    assert made.hear(4, 10, 5.0) is None


def test_successive_halving_lets_the_best_part_of_each_rung_go_on():
    made = judge(ACCURACY, type="successive-halving", min_resource=10, max_resource=90, reduction_factor=3)
    for number in range(7):
        made.begin(number)
    told = [made.hear(number, 10, 0.5 - number / 10) for number in range(6)]
    assert [why is None for why in told] == [True] + [False] * 5
    assert told[5] == (
        "successive-halving: accuracy 0 at step 10 is not in the best 1/3 of the 6 that came there; the best has 0.5"
    )
    assert made.hear(6, 10, 0.9) is None
    assert made.hear(6, 30, 0.1) is None  # the first to come so far
    assert made.hear(0, 20, 0.0) is None  # between two rungs
    assert made.hear(0, 30, 0.05) is not None
    assert made.hear(6, 90, 0.0) is None  # the end: there is nothing to be saved any more


def test_hyperband_spreads_trials_over_brackets_some_of_which_begin_to_stop_later():
    made = judge(type="hyperband", min_resource=10, max_resource=90, reduction_factor=3)
    for number in range(30):
        made.begin(number)
    stopped = [made.hear(number, 10, float(number)) for number in range(30)]
    assert 5 < sum(why is not None for why in stopped) < 25
    assert all("of its bracket" in why for why in stopped if why is not None)


@pytest.mark.parametrize(
    "pruner",
    [
        {"type": "median", "n_startup_trials": 2},
        {"type": "successive-halving", "min_resource": 10, "reduction_factor": 2},
        {"type": "hyperband", "min_resource": 10, "max_resource": 80, "reduction_factor": 2},
    ],
    ids=lambda pruner: pruner["type"],
)
def test_a_sweep_that_is_taken_up_goes_on_judging_as_it_would_have(pruner: dict[str, object]):
    """Trials one after the other. After half of them another judge hears what the bucket has, and decides the same."""

    def train(made: Judge, numbers: range) -> list[str | None]:
        verdicts: list[str | None] = []
        for number in numbers:
            made.begin(number)
            draw = random.Random(number)
            base = draw.random()
            told = None
            for step in (10, 20, 40):
                told = told or made.hear(number, step, base + draw.random() / step)
            made.end(number, "finished" if told is None else "pruned")
            verdicts.append(told)
        return verdicts

    whole = judge(**pruner)
    before, after = train(whole, range(12)), range(12, 24)
    again = judge(**pruner)
    for number in range(12):
        again.begin(number)
        for step, value in whole.heard(number):
            again.hear(number, step, value)
        again.end(number, "finished" if before[number] is None else "pruned")
    verdicts = train(whole, after)
    assert any(verdicts)
    assert None in verdicts
    assert train(again, after) == verdicts


def test_a_value_that_is_heard_twice_is_judged_once():
    made = judge(type="successive-halving", min_resource=10)
    for number in range(4):
        made.begin(number)
    assert made.hear(0, 10, 1.0) is None
    assert made.hear(1, 10, 2.0) is not None
    assert made.hear(1, 10, 2.0) is None
    assert made.heard(1) == ((10, 2.0),)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ({"min_iter": 3}, {"min_resource": 3, "reduction_factor": 3}),
        ({"min_iter": 5, "eta": 2}, {"min_resource": 5, "reduction_factor": 2}),
        ({"max_iter": 27, "s": 2}, {"min_resource": 3, "max_resource": 27, "reduction_factor": 3}),
    ],
)
def test_early_terminate_of_weights_and_biases_is_successive_halving(
    file: dict[str, int], wanted: dict[str, int]
):
    assert of_wandb({"type": "hyperband", **file}) == {"type": "successive-halving", **wanted}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ({"type": "median"}, "{type: hyperband, min_iter: N}"),
        ({"type": "hyperband"}, "give min_iter, or max_iter with s"),
        ({"type": "hyperband", "min_iter": 1, "max_iter": 9}, "give min_iter, or max_iter with s"),
        ({"type": "hyperband", "max_iter": 9}, "s says how many bands"),
        ({"type": "hyperband", "max_iter": 9, "s": 5}, "s says how many bands"),
        ({"type": "hyperband", "min_iter": 1, "strict": True}, "strict is not supported"),
        ({"type": "hyperband", "min_iter": "few"}, "min_iter is a whole number"),
        ({"type": "hyperband", "min_iterations": 3}, "there is no field min_iterations"),
    ],
)
def test_what_early_terminate_may_not_say(file: dict[str, object], told: str):
    with pytest.raises(PrunerError, match=r"^early_terminate: ") as caught:
        of_wandb(file)
    assert told in str(caught.value)
