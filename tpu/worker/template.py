"""The job template of a `cloud-tpu` work pool: the fields of a run that a pool can set for all its runs.

They are made of the models of a run's configuration, so that form and configuration never say different things.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, Literal, Self
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.workers.base import BaseJobConfiguration, BaseVariables
from prefect_gcp.credentials import GcpCredentials
from pydantic import Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from tpu.runs.config import RunConfig, Slice
from tpu.topology import ACCELERATOR_TYPES
from tpu.train.form import plain_optionals

# Fields of a run that a work pool may set, beside those of its slice.
OF_A_RUN = ("code", "pool", "max_cost", "budget", "secrets")
# What Prefect's own variables would ask for in vain: names and labels of machines that this worker does not make.
_NOT_OURS = ("name", "labels", "command")
# What the form asks for first, in this order; the rest comes behind.
ORDER = (
    "accelerator_type", "zone", "provisioning", "price_an_hour", "max_cost",
    "candidates", "race", "queue_minutes", "ready_minutes", "allow_regions",
    "pool", "idle_minutes", "chips", "pool_hours",
    "code", "secrets", "budget", "restarts",
    "runtime_version", "network", "subnetwork", "external_ips", "ssh_route", "service_account", "startup_script",
    "repair_minutes", "max_run_hours",
    "project", "bucket", "credentials", "env",
)  # fmt: skip
# Where the field's name says too little by itself.
_TITLES = {
    "price_an_hour": "Price an hour (US dollars)",
    "max_cost": "Maximum cost of a run (US dollars)",
    "race": "Candidates asked at once",
    "queue_minutes": "Minutes in the queue of one candidate",
    "ready_minutes": "Minutes until a slice must be ready",
    "allow_regions": "Other regions than the bucket's",
    "pool": "Pool of slices",
    "chips": "Chips of a shared slice",
    "pool_hours": "Hours to wait for a place in the pool",
    "code": "Program",
    "budget": "Budgets of failures",
    "external_ips": "External addresses",
    "repair_minutes": "Minutes to wait for a repair",
    "max_run_hours": "Hours of a flex-start slice",
}


def _title(name: str) -> str:
    return _TITLES.get(name) or name.replace("_", " ").capitalize()


def _field(name: str, field: FieldInfo) -> tuple[Any, FieldInfo]:
    mine, annotation = copy.copy(field), field.rebuild_annotation()
    mine.title = _title(name)
    if name == "accelerator_type":
        mine.json_schema_extra = {"enum": list(ACCELERATOR_TYPES)}
    if name == "code":  # behind a work pool there is no working tree
        annotation, mine.default = str | None, None
        mine.description = "A git URL or path with @commit, or a gs:// bundle; the deployment's own if empty."
        mine.examples = ["https://github.com/me/project@3f2a91c", "gs://my-bucket/code.tar.gz"]
    return annotation, mine


class _Variables(BaseVariables):
    """What is the worker's own of the form."""

    credentials: GcpCredentials | None = Field(
        default=None,
        title="Google Cloud credentials",
        description="A GcpCredentials block; the worker's own (application default) credentials if empty.",
    )
    project: str | None = Field(
        default=None, description="Google Cloud project; TPU_RELAY_PROJECT of the worker if empty.",
        examples=["my-project"],
    )  # fmt: skip
    bucket: str | None = Field(
        default=None, description="Bucket of the runs; TPU_RELAY_BUCKET of the worker if empty.",
        examples=["gs://my-runs"],
    )  # fmt: skip
    ssh_route: str | None = Field(
        default=None,
        title="Way to the hosts",
        description="external, internal, iap, jump:USER@HOST:PORT or a ProxyCommand; TPU_RELAY_SSH_ROUTE of the worker "
        "if empty.",
        examples=["internal", "iap"],
    )
    idle_minutes: float | None = Field(
        default=None, ge=0, title="Minutes that idle slices are kept",
        description="So long the pool keeps a slice that a run leaves, for the next one that fits; 0: the run deletes "
        "it. Set when a run starts; as `relay pool set` has it if empty.",
        examples=[20],
    )  # fmt: skip
    restarts: int = Field(
        default=3, ge=0, le=100, title="Restarts of a killed flow run",
        description="A flow run whose processes are killed is started again so often, and takes its gang up.",
    )  # fmt: skip

    @classmethod
    def model_json_schema(
        cls,
        by_alias: bool = True,
        ref_template: str = "#/definitions/{model}",
        schema_generator: type[GenerateJsonSchema] = GenerateJsonSchema,
        mode: Literal["validation", "serialization"] = "validation",
        *,
        union_format: Literal["any_of", "primitive_type_array"] = "any_of",
    ) -> dict[str, Any]:
        schema = super().model_json_schema(
            by_alias, ref_template, schema_generator, mode, union_format=union_format
        )
        for name in _NOT_OURS:
            schema["properties"].pop(name, None)
        plain_optionals(schema)
        schema["properties"] = {
            name: schema["properties"][name] for name in sorted(schema["properties"], key=_place)
        }
        return schema


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


_FIELDS: dict[str, Any] = {name: _field(name, field) for name, field in Slice.model_fields.items()}
_FIELDS |= {name: _field(name, RunConfig.model_fields[name]) for name in OF_A_RUN}
CloudTpuVariables: type[_Variables] = create_model("CloudTpuVariables", __base__=_Variables, **_FIELDS)


def renewed(template: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The template of this version with the values that people have set in the one of an existing work pool.

    A pool's template is made once and knows nothing of fields that come later.
    """
    new = copy.deepcopy(dict(template))
    had = old.get("variables", {}).get("properties", {})
    for name, field in new["variables"]["properties"].items():
        if had.get(name, {}).get("default") is not None:
            field["default"] = had[name]["default"]
    return new


class NotResolved(RuntimeError):
    """Something that the job variables of a flow run name is not there; the message says what to do."""


class CloudTpuConfiguration(BaseJobConfiguration):
    """The filled-in template of one flow run."""

    credentials: GcpCredentials | None = None
    project: str | None = None
    bucket: str | None = None
    ssh_route: str | None = None
    idle_minutes: float | None = None
    restarts: int = 3
    # What the run leaves open is taken from here; see tpu.worker.parameters.
    defaults: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra={
            "template": {
                "slice": {name: f"{{{{ {name} }}}}" for name in Slice.model_fields},
                **{name: f"{{{{ {name} }}}}" for name in OF_A_RUN},
            }
        },
    )

    @classmethod
    async def resolve_for_flow_run(
        cls,
        flow_run: FlowRun,
        *,
        client: PrefectClient,
        work_pool: WorkPool,
        worker_name: str,
        worker_id: UUID | None = None,
        deployment: DeploymentResponse | None = None,
    ) -> Self:
        """As Prefect does, but a flow run outlives its deployment: it still trains, and is to be looked after.

        Raises:
            NotResolved: a block or variable is missing. Prefect's ObjectNotFound would say that the flow run is.
        """
        if deployment is None and flow_run.deployment_id is not None:
            with contextlib.suppress(ObjectNotFound):
                deployment = await client.read_deployment(flow_run.deployment_id)
            if deployment is None:
                flow_run = flow_run.model_copy(update={"deployment_id": None})
        try:
            return await super().resolve_for_flow_run(
                flow_run, client=client, work_pool=work_pool, worker_name=worker_name, worker_id=worker_id,
                deployment=deployment,
            )  # fmt: skip
        except ObjectNotFound as error:
            raise NotResolved(
                "a block that the job variables or the work pool name is not there: make it again, or name another "
                f"({error})"
            ) from error

    @classmethod
    def json_template(cls) -> dict[str, Any]:
        return {name: value for name, value in super().json_template().items() if name not in _NOT_OURS}

    def connection_environment(self) -> dict[str, str]:
        """The variables by which a flow finds its project, bucket and hosts, as far as the pool sets them."""
        said = {
            "TPU_RELAY_PROJECT": self.project,
            "TPU_RELAY_BUCKET": self.bucket,
            "TPU_RELAY_SSH_ROUTE": self.ssh_route,
            "TPU_RELAY_IDLE_MINUTES": None if self.idle_minutes is None else f"{self.idle_minutes:g}",
        }
        return {name: value for name, value in said.items() if value}
