"""The deployments are flows that exist, with schedules and parameters that they take."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from flows.train import train
from tpu.runs.config import parse_run_config

ROOT = Path(__file__).parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())[
    "deployments"
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one["name"])
def test_each_deployment_is_of_a_flow_that_takes_its_parameters(deployment: dict[str, Any]):
    path, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(flow, Flow)
    assert set(deployment.get("parameters", {})) <= set(inspect.signature(flow.fn).parameters)


def test_the_reaper_runs_every_ten_minutes_and_never_twice_at_once():
    (reaper,) = [one for one in DEPLOYMENTS if one["entrypoint"] == "flows/reap.py:reap"]
    (schedule,) = reaper["schedules"]
    assert (schedule["interval"], schedule["active"]) == (600, True)
    assert reaper["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


TRAININGS = [one for one in DEPLOYMENTS if one["entrypoint"] == "flows/train.py:train"]


@pytest.mark.parametrize("deployment", TRAININGS, ids=lambda one: one["name"])
def test_a_training_is_the_configuration_of_its_name_and_each_start_a_run_of_its_own(
    deployment: dict[str, Any],
):
    configured = yaml.safe_load((ROOT / f"deployments/runs/{deployment['name']}.yaml").read_text())
    assert parse_run_config(deployment["parameters"]["run"]) == parse_run_config(configured)
    assert deployment["parameters"]["fresh_name"] is True
    # Behind a form there is no working tree.
    assert deployment["work_pool"] == {"name": "tpu", "job_variables": {"code": "{{ code.stdout }}"}}


def test_what_can_be_filled_into_the_form_says_what_it_is():
    properties = parameter_schema(train).properties
    assert set(properties) == {"run", "take_over", "changes", "fresh_name"}
    assert [name for name, field in properties.items() if not field.get("description")] == []
