"""Sweep files: ours, those of Weights & Biases, and each way to be wrong with one clear sentence."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpu.runs.config import RunConfigError
from tpu.sweeps.config import Sweep, SweepError, load_sweep, parse_sweep, places_of
from tpu.sweeps.pruner import Pruner
from tpu.sweeps.trial import trial_name, trial_run

ROOT = Path(__file__).parents[2]
ICL = {"training": {"workload": {"kind": "icl"}}, "slice": {"chips": 1}}
RATE = "training.optimizer.learning_rate"
FIGURE = {"name": "evaluation/new.delta_ridge"}


def parse(**values: Any) -> Sweep:
    return parse_sweep({"run": ICL, "parameters": {RATE: {"values": [0.1, 0.2]}}} | values, "mine")


def test_a_grid_of_fields_and_seeds():
    sweep = parse(seeds=3)
    assert (sweep.run.name, sweep.search.runs, places_of(sweep.run)) == ("mine", 6, 4)
    run = trial_run(sweep.run, {RATE: 0.2}, 2)
    assert run.training is not None
    assert (run.training.optimizer.learning_rate, run.training.seed) == (0.2, 2)


def test_trials_may_be_compared_by_what_their_evaluator_says():
    assert parse(metric=FIGURE).search.metric.figure == "new.delta_ridge"
    own = {"command": "python a.py", "contract": True, "evaluate_command": "python b.py"}
    assert parse(metric=FIGURE, run=own, parameters={"seed": {"value": 1}}).search.metric.goal == "minimize"
    assert parse().search.metric.figure is None


def test_a_trial_is_named_by_its_sweep_and_its_parameters_alone():
    names = [trial_name("s", {"a": 1, "b": 2}, 0), trial_name("s", {"b": 2, "a": 1}, 0)]
    assert names[0] == names[1]
    others = [trial_name("t", {"a": 1, "b": 2}, 0), trial_name("s", {"a": 1, "b": 2}, 1),
              trial_name("s", {"a": 1, "b": 3}, 0), trial_name("s", {"a": 1, "b": 2}, None)]  # fmt: skip
    assert len({*names, *others}) == 5


WANDB = """
program: train.py
method: bayes
project: mine
metric: {name: val_loss, goal: minimize, target: 0.1}
run_cap: 20
early_terminate: {type: hyperband, min_iter: 3}
parameters:
  lr: {distribution: log_uniform_values, min: 0.0001, max: 0.1}
  batch: {values: [16, 32]}
  epochs: {value: 3}
  model: {parameters: {width: {distribution: q_uniform, min: 32, max: 128, q: 32}}}
command: ["${env}", "${interpreter}", "${program}", "${args}"]
"""


def test_a_weights_and_biases_file_is_read_unchanged_and_what_has_no_effect_is_said(tmp_path: Path):
    file = tmp_path / "wandb-sweep.yaml"
    file.write_text(WANDB)
    sweep = load_sweep(file)
    assert (sweep.run.name, sweep.search.method, sweep.search.runs) == ("wandb-sweep", "tpe", 20)
    assert {note.partition(" ")[0] for note in sweep.notes} == {"early_terminate", "project", "metric.target"}
    assert sweep.search.pruner == Pruner(type="successive-halving", min_resource=3, reduction_factor=3)
    run = trial_run(sweep.run, {"lr": 0.01, "batch": 16, "epochs": 3, "model.width": 32.0}, None)
    assert run.command == [
        "/usr/bin/env", "python", "train.py", "--lr=0.01", "--batch=16", "--epochs=3", "--model.width=32.0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("${args}", ["--on=True", "--off=False", "--n=1"]),
        ("${args_no_hyphens}", ["on=True", "off=False", "n=1"]),
        ("${args_no_boolean_flags}", ["--on", "--n=1"]),
        ("${args_json}", ['{"on": true, "off": false, "n": 1}']),
    ],
)
def test_arguments_come_in_each_form(word: str, wanted: list[str]):
    values = {"on": True, "off": False, "n": 1}
    sweep = parse(
        run={"command": ["python", "x.py", word]}, parameters={k: {"value": v} for k, v in values.items()}
    )
    assert trial_run(sweep.run, values, None).command == ["python", "x.py", *wanted]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"parameters": {}}, "the space is empty"),
        (
            {"metric": FIGURE, "pruner": {"type": "median"}},
            "trials are pruned by what they log on their way, and evaluation/new.delta_ridge is known only at",
        ),
        ({"metric": FIGURE | {"value": "min"}}, "metric.value: only the last checkpoint is evaluated"),
        ({"metric": FIGURE, "run": ICL | {"evaluate": "never"}}, "evaluate: never forbids it"),
        ({"metric": {"name": "evaluation/new.delta"}}, "has no 'new.delta' with"),
        (
            {
                "metric": {"name": "evaluation/new.delta_dmmse"},
                "parameters": {"training.workload.tasks": {"values": [4, None]}},
            },
            "has no 'new.delta_dmmse' with training.workload.tasks=None; it has new.delta_ridge",
        ),
        (
            {"metric": FIGURE, "run": {"command": "a", "contract": True}, "parameters": {"seed": {"value": 1}}},
            "a program of your own needs an evaluate_command for it",
        ),
        (
            {"metric": FIGURE, "run": {"command": "python a.py"}, "parameters": {"seed": {"value": 1}}},
            "this run saves by its own means, so there is no checkpoint of ours to evaluate",
        ),
        ({"parameters": {RATE: {"values": []}}}, "values is empty: there is nothing to try"),
        ({"parameters": {"training.learning_rat": {"values": [1]}}}, "did you mean learning_rate"),
        ({"parameters": {RATE: {"values": [0.1, -1]}}}, "greater than 0"),
        ({"parameters": {RATE: {"min": 0.1, "max": 0.2}}}, "a grid needs `values`"),
        ({"parameters": {RATE: {"min": 0.2, "max": 0.1}}, "method": "random", "trials": 3}, "not below max"),
        ({"parameters": {RATE: {"distribution": "normal", "mu": 0}}}, "there is no such field"),
        ({"parameters": {RATE: {"distribution": "beta", "min": 0, "max": 1}}}, "beta is not supported"),
        ({"parameters": {RATE: {"values": [1], "when": {"x": 1}}}}, "no parameter above it"),
        ({"method": "random"}, "say how many runs, such as trials: 50"),
        ({"method": "quasi"}, "'grid', 'random', 'quasi-random' or 'tpe'"),
        ({"metric": {"name": "accuracy"}}, "icl never logs 'accuracy'; it logs loss"),
        ({"run": ICL | {"slice": {"chips": 8}}}, "1, 2, 4 of its 4 chips"),
        ({"parameters": {"slice.chips": {"values": [1, 16]}}}, "1, 2, 4 of its 4 chips"),
        ({"parameters": {f"variables.{n}": {"min": 1, "max": 1000} for n in "ABC"}}, "1,000,000,000 runs"),
        ({"storage": "postgresql://me:secret@db/x"}, "write env:VARIABLE"),
        ({"seedz": 3}, "there is seeds"),
        ({"parameters": {RATE: {"values": [0.1, 1, 1.0]}}}, "1.0 stands there twice"),
        ({"parameters": {"variables.DAY": {"values": [datetime.date(2026, 1, 2)]}}}, "put it into quotes"),
        ({"parameters": {"name": {"values": ["a", "b"]}}}, "a trial's name comes of its parameters"),
        ({"parameters": {"training.seed": {"values": [1]}}, "seeds": 3}, "`seeds` says it, too"),
        ({"pruner": {"type": "mean"}}, "'median', 'successive-halving' or 'hyperband'"),
        ({"pruner": {"type": "median", "min_resource": 1}}, "min_resource is no field of median"),
        ({"pruner": {"type": "median"}}, "5 trials have finished, and there are 2 in all"),
        ({"pruner": {"type": "median", "n_startup_trials": 1, "n_warmup_steps": 950}}, "is behind step 800"),
        ({"pruner": {"type": "hyperband", "min_resource": 9, "max_resource": 9}}, "nothing would ever be stopped"),
        ({"pruner": {"type": "successive-halving", "min_resource": 950}}, "is behind step 800"),
        ({"pruner": {"type": "hyperband"}, "run": ICL | {"checkpoints": {"every": 1000}}}, "set run.checkpoints.every"),
        ({"pruner": {"type": "successive-halving"}, "run": {"command": ["x", "${args}"]}}, "how many logged values"),
        (
            {"pruner": {"type": "hyperband", "min_resource": 2}, "run": {"command": ["x", "${args}"]}},
            "max_resource: how many values does a trial log",
        ),
        ({"early_terminate": {"type": "hyperband", "min_iter": 3}}, "is stopped at its checkpoints"),
        (
            {"pruner": {"type": "median"}, "early_terminate": {}, "run": {"command": ["x", "${args}"]}},
            "not both",
        ),
        ({"run": ICL | {"name": "n" * 40}}, "at most 31 characters"),
        ({"run": {"command": ["x"]}, "parameters": {"lr": {"value": 1}}}, "write ${args} into its command"),
        ({"run": {}, "program": "x.py", "command": ["${envvar:A}"]}, "${envvar:A} is not supported"),
        ({"run": {}, "command": ["${program}"]}, "the command names ${program}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_sweep_is_refused_at_once_with_one_clear_error(wrong: dict[str, Any], told: str):
    with pytest.raises((SweepError, RunConfigError)) as caught:
        parse(**wrong)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_file_that_comes_with_tpu_relay_is_a_sweep():
    files = sorted((ROOT / "deployments/sweeps").glob("*.yaml"))
    assert files
    for file in files:
        assert load_sweep(file).run.name == yaml.safe_load(file.read_text())["run"]["name"]
