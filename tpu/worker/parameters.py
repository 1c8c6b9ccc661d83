"""The parameters a flow run really starts with: those of its form, over what the work pool says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu.runs.config import parse_run_config
from tpu.runs.starting import start_values

# A run that says for itself where or how it wants its slice is not sent to the pool's other places.
_OWN_WAY = ("zone", "accelerator_type", "provisioning", "candidates")
# What is true of one accelerator type on certain terms only.
_OF_A_TYPE = ("price_an_hour", "runtime_version", "chips")


def run_parameters(
    parameters: Mapping[str, Any], defaults: Mapping[str, Any], flow_run_id: str
) -> dict[str, Any]:
    """Parameters of a flow that trains a run, complete: changes made, a fresh name given, gaps filled from the pool.

    Other flows (without a `run`) keep theirs. Done again with its own result, it changes nothing.

    Raises:
        tpu.runs.config.RunConfigError: the run could not be; one line for each wrong field.
    """
    run = parameters.get("run")
    if not isinstance(run, Mapping):
        return dict(parameters)
    values = start_values(
        run, parameters.get("changes") or {}, bool(parameters.get("fresh_name")), flow_run_id
    )
    values = with_defaults(values, defaults)
    parse_run_config(values)
    done = {"changes": {}, "fresh_name": False}
    return {**parameters, "run": values, **{name: done[name] for name in done if name in parameters}}


def run_name(parameters: Mapping[str, Any]) -> str | None:
    """Name of the run that a flow run trains, if it trains one."""
    run = parameters.get("run")
    name = run.get("name") if isinstance(run, Mapping) else None
    return name if isinstance(name, str) else None


def with_defaults(run: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A run's values, and under them those of the work pool; what the run says, and be it null, stands."""
    filled = {**defaults, **run}
    for name in ("budget", "secrets"):
        if isinstance(run.get(name), Mapping):
            filled[name] = {**defaults.get(name, {}), **run[name]}
    own, pools = run.get("slice") or {}, defaults.get("slice", {})
    filled["slice"] = {**_fitting(own, pools), **own} if isinstance(own, Mapping) else own
    return filled


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
