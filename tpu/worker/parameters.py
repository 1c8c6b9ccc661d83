"""The parameters a flow run really starts with: what its form and its deployment say, over what the work pool says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu.runs.config import RunConfig, RunConfigError, parse_run_config
from tpu.runs.starting import start_values

# A run that says for itself where or how it wants its slice is not sent to the pool's other places.
_OWN_WAY = ("zone", "accelerator_type", "provisioning", "candidates")
# What is true of one accelerator type on certain terms only.
_OF_A_TYPE = ("price_an_hour", "runtime_version", "chips")
# Fields whose own fields are filled one by one.
_NESTED = ("slice", "budget", "secrets")
WORKING_TREE = RunConfig.model_fields["code"].default


def run_parameters(
    parameters: Mapping[str, Any], defaults: Mapping[str, Any], flow_run_id: str
) -> dict[str, Any]:
    """Parameters of a flow that trains a run, complete: gaps filled from the pool, changes made, a fresh name given.

    `defaults` are what the work pool says. Other flows (without a `run`) keep their parameters.

    Raises:
        tpu.runs.config.RunConfigError: the run could not be; one line for each wrong field.
    """
    run = parameters.get("run")
    if not isinstance(run, Mapping):
        return dict(parameters)
    # The server checks this for a form; a deployment may have that left out.
    changes = _mapping("changes", parameters.get("changes") or {})
    # Changes are what somebody said, so the pool must know them; only the name is not its business.
    said = start_values(run, changes, False, "")
    if said.get("code") == WORKING_TREE:
        del said["code"]  # behind a work pool there is none
    fresh_name = bool(parameters.get("fresh_name")) and "name" not in changes
    values = start_values(with_defaults(said, defaults), {}, fresh_name, flow_run_id)
    parse_run_config(values)
    done = {"changes": {}, "fresh_name": False}
    return {**parameters, "run": values, **{name: done[name] for name in done if name in parameters}}


def run_name(parameters: Mapping[str, Any]) -> str | None:
    """Name of the run that a flow run trains, if it trains one."""
    run = parameters.get("run")
    name = run.get("name") if isinstance(run, Mapping) else None
    return name if isinstance(name, str) else None


def with_defaults(run: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A run's values, and under them those of the work pool. What is null was left empty."""
    filled = {**defaults, **_said(run, defaults)}
    for name in _NESTED:
        own, pools = run.get(name) or {}, _mapping(f"{name} of the work pool", defaults.get(name) or {})
        if isinstance(own, Mapping):
            said = _said(own, pools)
            filled[name] = {**(_fitting(said, pools) if name == "slice" else pools), **said}
    return filled


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    """Raises RunConfigError: whatever else it raised would be a crash, and a crashed flow run is started again."""
    if not isinstance(value, Mapping):
        raise RunConfigError(f"{name}: a mapping of fields to values is wanted (found {value!r})")
    return value


def _said(own: Mapping[str, Any], pools: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if value is not None or name not in pools}


def _fitting(own: Mapping[str, Any], pools: Mapping[str, Any]) -> dict[str, Any]:
    """Of the pool's slice, what may be said of the run's."""
    left_out: set[str] = set()
    if any(name in own for name in _OWN_WAY):
        left_out.add("candidates")
    if any(
        own.get(name, pools.get(name)) != pools.get(name) for name in ("accelerator_type", "provisioning")
    ):
        left_out.update(_OF_A_TYPE)
    return {name: value for name, value in pools.items() if name not in left_out}
