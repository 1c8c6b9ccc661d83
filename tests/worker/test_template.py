"""The work pool's form: the fields of a run, and how they come to the worker."""

from __future__ import annotations

import copy
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import Flow, FlowRun, WorkPool
from prefect.exceptions import ObjectNotFound
from prefect.utilities.templating import apply_values
from prefect.workers.base import BaseWorker

from tpu.runs.config import Slice
from tpu.worker.template import OF_A_RUN, ORDER, CloudTpuConfiguration, NotResolved, renewed
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


class Records:
    """What a server answers from which deployment and block were deleted. It has the flow."""

    async def read_deployment(self, _: UUID) -> Any:
        raise ObjectNotFound(Exception("404"))

    async def read_flow(self, flow_id: UUID) -> Flow:
        return Flow(id=flow_id, name="train", labels={})

    async def read_block_document(self, _: UUID) -> Any:
        raise ObjectNotFound(Exception("404"))


async def resolved(job_variables: dict[str, Any]) -> CloudTpuConfiguration:
    return await CloudTpuConfiguration.resolve_for_flow_run(
        FlowRun(flow_id=uuid4(), deployment_id=uuid4(), job_variables=job_variables),
        client=cast(PrefectClient, Records()),
        work_pool=WorkPool(
            name="tpu", type="cloud-tpu", base_job_template=TEMPLATE, default_queue_id=uuid4()
        ),
        worker_name="w",
    )


async def test_a_flow_run_whose_deployment_was_deleted_is_looked_after_still():
    """Its restarted worker took it for deleted itself, and killed its training."""
    assert (await resolved({"bucket": "gs://mine"})).bucket == "gs://mine"


async def test_a_missing_block_is_not_taken_for_a_deleted_flow_run():
    with pytest.raises(NotResolved, match="is not there: make it again"):
        await resolved({"credentials": {"$ref": {"block_document_id": str(uuid4())}}})
