"""The job template of a `cloud-tpu` work pool: the fields of a run that a pool can set for all its runs.

They are made of the models of a run's configuration, so that form and configuration never say different things.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from prefect.workers.base import BaseJobConfiguration, BaseVariables
from prefect_gcp.credentials import GcpCredentials
from pydantic import Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from tpu.runs.config import RunConfig, Slice
from tpu.topology import ACCELERATOR_TYPES

# Fields of a run that a work pool may set, beside those of its slice.
OF_A_RUN = ("code", "pool", "max_cost", "budget", "secrets")
# What Prefect's own variables would ask for in vain: names and labels of machines that this worker does not make.
_NOT_OURS = ("name", "labels", "command")
_WORDS = {"ips": "IPs"}


def _title(name: str) -> str:
    words = [_WORDS.get(word, word) for word in name.split("_")]
    return " ".join([words[0].capitalize(), *words[1:]])


def _field(name: str, field: FieldInfo) -> tuple[Any, FieldInfo]:
    mine = copy.copy(field)
    mine.title = _title(name)
    if name == "accelerator_type":
        mine.json_schema_extra = {"enum": list(ACCELERATOR_TYPES)}
    return field.rebuild_annotation(), mine


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
    restarts: int = Field(
        default=3, ge=0, le=100,
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
        for field in schema["properties"].values():
            _without_null(field)
        first = [*Slice.model_fields, *OF_A_RUN]
        schema["properties"] = {
            name: schema["properties"][name] for name in sorted(schema["properties"], key=_place(first))
        }
        return schema


def _without_null(field: dict[str, Any]) -> None:
    """A field that may be left open is one that is not required: a choice between a text and null helps nobody."""
    others = [one for one in field.get("anyOf", []) if one != {"type": "null"}]
    if len(others) == 1 and field.get("default", 0) is None:
        del field["anyOf"], field["default"]
        field.update(others[0])


def _place(first: list[str]) -> Any:
    return lambda name: first.index(name) if name in first else len(first)


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


class CloudTpuConfiguration(BaseJobConfiguration):
    """The filled-in template of one flow run."""

    credentials: GcpCredentials | None = None
    project: str | None = None
    bucket: str | None = None
    ssh_route: str | None = None
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
    def json_template(cls) -> dict[str, Any]:
        return {name: value for name, value in super().json_template().items() if name not in _NOT_OURS}

    def deployed_parameters(self) -> dict[str, Any]:
        """The parameters that the flow run's deployment states."""
        deployment = self._related_objects.get("deployment")
        return dict(deployment.parameters) if deployment is not None else {}

    def connection_environment(self) -> dict[str, str]:
        """The variables by which a flow finds its project, bucket and hosts, as far as the pool sets them."""
        said = {
            "TPU_RELAY_PROJECT": self.project,
            "TPU_RELAY_BUCKET": self.bucket,
            "TPU_RELAY_SSH_ROUTE": self.ssh_route,
        }
        return {name: value for name, value in said.items() if value}
