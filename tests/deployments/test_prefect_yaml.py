"""The deployments are flows that exist, with schedules and parameters that they take."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

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
