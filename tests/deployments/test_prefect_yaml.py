"""The deployments are flows that exist, with schedules and parameters that they take."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema, parameter_schema_from_entrypoint
from prefect.utilities.schema_tools.validation import validate

from deployments.deploy import FORMER
from flows.evaluate import evaluate
from flows.reap import reap
from flows.steer import steer
from flows.sweep import scheduled_name, sweep
from flows.train import train
from tpu.runs.config import parse_run_config
from tpu.sweeps.config import load_sweep, parse_search
from tpu.sweeps.trial import NAME_LENGTH
from tpu.worker.template import OF_A_RUN

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


def test_no_two_deployments_are_called_alike_and_none_as_one_that_is_deleted():
    """The list of the UI has their names large, and the flow's below in small letters."""
    names = [one["name"] for one in DEPLOYMENTS]
    assert len(set(names)) == len(names)
    assert {former.partition("/")[2] for former in FORMER}.isdisjoint({*names} - {"sweep"})


def test_the_reaper_runs_every_ten_minutes_and_never_twice_at_once():
    (reaper,) = [one for one in DEPLOYMENTS if one["entrypoint"] == "flows/reap.py:reap"]
    (schedule,) = reaper["schedules"]
    assert (schedule["interval"], schedule["active"]) == (600, True)
    assert reaper["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_the_server_takes_the_sweeps_of_the_deployments():
    schema = parameter_schema(sweep).model_dump()
    for one in DEPLOYMENTS:
        if one["entrypoint"] == "flows/sweep.py:sweep":
            validate(one["parameters"], schema, raise_on_error=True)


def test_a_sweep_is_the_file_of_its_name_and_a_scheduled_one_is_named_by_its_time():
    by_hand, nightly = (one for one in DEPLOYMENTS if one["entrypoint"] == "flows/sweep.py:sweep")
    wanted = load_sweep(ROOT / "deployments/sweeps/icl.yaml")
    for one in (by_hand, nightly):
        assert parse_run_config(one["parameters"]["run"]) == wanted.run
        assert parse_search(one["parameters"]["search"]) == wanted.search
    assert by_hand["parameters"]["fresh_name"] is True
    assert "fresh_name" not in nightly["parameters"]
    assert scheduled_name(wanted.run.name, "261130-020000") == "icl-lr-261130-020000"
    assert len(scheduled_name("n" * 31, "261130-020000")) == NAME_LENGTH


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


FLOWS = [train, sweep, steer, evaluate, reap]


def fields(flow: Flow[..., Any]) -> dict[str, dict[str, Any]]:
    """All fields of a flow's form, those of the models inside it too, by where they are."""
    schema = parameter_schema(flow).model_dump()
    found: dict[str, dict[str, Any]] = {**schema["properties"]}
    for model, definition in schema["definitions"].items():
        found |= {f"{model}.{name}": field for name, field in definition["properties"].items()}
    return found


@pytest.mark.parametrize("flow", FLOWS, ids=lambda one: one.name)
def test_what_can_be_filled_into_the_form_says_what_it_is(flow: Flow[..., Any]):
    assert [where for where, field in fields(flow).items() if not field.get("description")] == []


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one["name"])
def test_a_form_that_nobody_touched_is_accepted(deployment: dict[str, Any]):
    # As `prefect deploy` makes it: from the source, where a default is what the source says literally.
    schema = parameter_schema_from_entrypoint(deployment["entrypoint"]).model_dump()
    untouched = {
        name: field["default"]
        for name, field in schema["properties"].items()
        if name not in schema["required"]
    } | deployment["parameters"]
    errors = validate(untouched, schema | {"required": []}, raise_on_error=False, preprocess=False)
    assert errors == [], errors


def test_the_forms_ask_first_for_what_is_wanted_most():
    assert list(parameter_schema(train).properties) == ["fresh_name", "changes", "run", "take_over"]
    assert list(parameter_schema(sweep).properties) == [
        "fresh_name", "changes", "search", "run", "rerun_failed", "code",
    ]  # fmt: skip
    assert list(parameter_schema(evaluate).properties) == ["checkpoint", "commits", "again"]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda one: one.name)
def test_a_field_that_may_be_left_open_is_no_choice_between_something_and_null(flow: Flow[..., Any]):
    # Where null is an answer of its own (no `tasks` are new ones each time), or leaves out a whole model.
    meant = {"Icl.tasks", "RunConfig.training", "Search.pruner"}
    assert {where for where, field in fields(flow).items() if "anyOf" in field} <= meant


def shown(schema: dict[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """The fields of a model in the form, those of the models inside it too, as a person meets them."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in schema["definitions"][model]["properties"].items():
        found[f"{model}.{name}"] = field
        for inner in re.findall(r"#/definitions/(\w+)", json.dumps(field)):
            found |= shown(schema, inner)
    return found


def test_the_form_of_a_training_is_short_and_asks_for_nothing_twice():
    schema = parameter_schema(train).model_dump()
    fields = shown(schema, "RunConfig")
    assert len([where for where in fields if not where.startswith(("Icl.", "ByteLm."))]) <= 28
    assert [where for where in fields if where.endswith(".seed")] == ["Training.seed"]
    # In this order, whatever a database makes of the order of keys.
    for model in ("RunConfig", "Slice", "Training", "CheckpointRule"):
        own = schema["definitions"][model]["properties"].values()
        assert [field["position"] for field in own] == list(range(len(own)))


def test_what_the_work_pool_says_has_no_default_in_the_form():
    """Or the form would send it unasked, and whoever chooses a default against the pool could not be told."""
    fields = shown(parameter_schema(train).model_dump(), "RunConfig")
    said = {"RunConfig.slice", *(f"RunConfig.{name}" for name in OF_A_RUN)}
    pools = {where: field for where, field in fields.items() if where.startswith("Slice.") or where in said}
    assert pools.keys() > {"RunConfig.slice", "RunConfig.code", "Slice.zone", "Slice.provisioning"}
    for where, field in pools.items():
        assert "default" not in field, where
        assert field["description"].endswith(" If empty: as the work pool says."), where
        # The form of the UI sends `false` for a switch that nobody has touched.
        assert field.get("type") != "boolean", where


def test_the_server_takes_a_run_with_all_its_fields_as_well_as_one_with_few():
    run: dict[str, Any] = {
        "name": "x",
        "command": ["true"],
        "slice": {"candidates": [{"zone": "us-east5-a"}]},
    }
    schema = parameter_schema(train).model_dump()
    for values in (run, parse_run_config(run).model_dump(mode="json")):
        validate({"run": values}, schema, raise_on_error=True)
