"""The work pool's form: the fields of a run, and how they come to the worker."""

from __future__ import annotations

import copy
from typing import Any

from prefect.utilities.templating import apply_values
from prefect.workers.base import BaseWorker

from tpu.runs.config import Slice
from tpu.worker.template import OF_A_RUN, ORDER, renewed
from tpu.worker.worker import CloudTpuWorker

TEMPLATE = CloudTpuWorker.get_default_base_job_template()
FORM: dict[str, dict[str, Any]] = TEMPLATE["variables"]["properties"]


def test_prefect_finds_the_worker_by_its_type():
    assert BaseWorker.get_worker_class_from_type("cloud-tpu") is CloudTpuWorker


def test_every_field_says_what_it_is_and_none_is_asked_for_in_vain():
    assert set(FORM) > {*Slice.model_fields, *OF_A_RUN, "credentials", "project", "bucket", "env"}
    assert [name for name, field in FORM.items() if not field.get("description")] == []
    assert [name for name, field in FORM.items() if not field.get("title") and "$ref" not in field] == []
    assert {"name", "labels", "command"}.isdisjoint(FORM)
    assert list(FORM)[:4] == ["accelerator_type", "zone", "provisioning", "price_an_hour"]
    assert set(ORDER) <= set(FORM)
    assert {"v4-8", "v6e-256"} <= set(FORM["accelerator_type"]["enum"])
    assert FORM["provisioning"]["enum"] == ["spot", "preemptible", "on-demand", "reserved", "flex-start"]


def test_what_the_form_says_comes_to_the_run_and_what_it_leaves_open_does_not():
    said = {name: field["default"] for name, field in FORM.items() if field.get("default") is not None}
    said |= {"zone": "us-east1-d", "max_cost": 5, "bucket": "gs://b", "idle_minutes": 0}
    filled = CloudTpuWorker.job_configuration(**apply_values(TEMPLATE["job_configuration"], said))
    assert filled.defaults["slice"]["zone"] == "us-east1-d"
    assert filled.defaults["slice"]["accelerator_type"] == Slice().accelerator_type
    assert filled.defaults["max_cost"] == 5
    assert "price_an_hour" not in filled.defaults["slice"]
    assert "code" not in filled.defaults  # behind a work pool there is no working tree
    assert filled.connection_environment() == {"TPU_RELAY_BUCKET": "gs://b", "TPU_RELAY_IDLE_MINUTES": "0"}


def test_what_people_set_in_a_pool_outlives_a_new_version_of_its_template():
    old = copy.deepcopy(TEMPLATE)
    old["variables"]["properties"]["zone"]["default"] = "us-east1-d"
    del old["variables"]["properties"]["race"]
    new = renewed(TEMPLATE, old)["variables"]["properties"]
    assert (new["zone"]["default"], new["race"]) == ("us-east1-d", FORM["race"])
    assert FORM["zone"]["default"] == "us-central2-b"
