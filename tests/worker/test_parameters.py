"""What a flow run starts with: its form's values over those of the work pool."""

from __future__ import annotations

from typing import Any

import pytest

from tpu.runs.config import RunConfig, RunConfigError
from tpu.worker.parameters import run_parameters, with_defaults

FLOW_RUN = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
POOL: dict[str, Any] = {
    "slice": {
        "accelerator_type": "v4-16", "provisioning": "spot", "zone": "us-central2-b", "price_an_hour": 8.0,
        "runtime_version": "own-image", "candidates": [{"zone": "us-east1-d"}],
    },
    "budget": {"infrastructure": 5, "user_failure": 1},
    "secrets": {"TOKEN": "block:token"},
    "max_cost": 9.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, POOL["slice"]),
        # Another type has another price and image, and was not meant by the candidates.
        (
            {"accelerator_type": "v4-8"},
            {"accelerator_type": "v4-8", "provisioning": "spot", "zone": "us-central2-b"},
        ),
        # Another zone is the same hardware at the same price; but the run wants that zone and no other.
        (
            {"zone": "us-east1-d"},
            {k: v for k, v in POOL["slice"].items() if k != "candidates"} | {"zone": "us-east1-d"},
        ),
    ],
    ids=["as the pool says", "another type", "another zone"],
)
def test_a_slice_is_filled_from_the_pool_where_that_fits(run: dict[str, Any], expected: dict[str, Any]):
    assert with_defaults({"slice": run}, POOL)["slice"] == expected


def test_what_a_run_says_stands_and_the_rest_is_the_pools():
    filled = with_defaults({"budget": {"user_failure": 7}, "secrets": {"KEY": "env:KEY"}}, POOL)
    assert filled["budget"] == {"infrastructure": 5, "user_failure": 7}
    assert filled["secrets"] == {"TOKEN": "block:token", "KEY": "env:KEY"}
    assert filled["max_cost"] == 9.0


@pytest.mark.parametrize(
    "field", ["slice.zone", "slice.external_ips", "budget.infrastructure", "pool", "code"]
)
def test_a_value_that_is_also_the_default_can_be_chosen_against_the_pools(field: str):
    """Whoever writes it means it; a form sends nothing of a field that nobody filled in."""
    chosen: dict[str, Any] = {"name": "x", "command": "true"}
    default = RunConfig.model_validate(chosen).model_dump(mode="json")
    pool = {
        "slice": {"zone": "us-east1-d", "external_ips": False},
        "budget": {"infrastructure": 5},
        "pool": "others",
        "code": "/tree@abc",
    }

    def of(values: Any) -> Any:
        for part in field.split("."):
            values = values[part]
        return values

    untouched = run_parameters({"run": chosen, "changes": {}}, pool, FLOW_RUN)["run"]
    assert of(untouched) == of(pool)
    said = run_parameters({"run": chosen, "changes": {field: of(default)}}, pool, FLOW_RUN)["run"]
    # Only the working tree is nothing that can be meant: behind a work pool there is none.
    assert of(said) == (pool["code"] if field == "code" else of(default))


def test_what_is_left_empty_is_the_pools_to_say():
    run = {
        "name": "x",
        "command": "true",
        "max_cost": None,
        "slice": {"price_an_hour": None, "network": None},
    }
    done = run_parameters({"run": run}, POOL, FLOW_RUN)["run"]
    assert (done["max_cost"], done["slice"]["price_an_hour"]) == (9.0, 8.0)
    assert done["slice"]["network"] is None
    assert run_parameters({"run": run | {"slice": None}}, POOL, FLOW_RUN)["run"]["slice"] == POOL["slice"]


def test_changes_are_made_and_a_fresh_name_is_given_once():
    given = {
        "run": {"name": "a-name-that-is-as-long-as-a-name-may-be-x", "command": "true"},
        "changes": {"slice.zone": "us-east1-d", "steps": 5}, "fresh_name": True, "take_over": False,
    }  # fmt: skip
    given["run"]["name"] = given["run"]["name"][:40]
    done = run_parameters(given, POOL, FLOW_RUN)
    assert done["run"]["name"] == "a-name-that-is-as-long-as-a-nam-0f1e2d3c"
    assert (done["run"]["slice"]["zone"], done["run"]["steps"]) == ("us-east1-d", 5)


def test_a_name_that_somebody_gave_is_kept():
    given = {"run": {"name": "icl", "command": "true"}, "changes": {"name": "mine"}, "fresh_name": True}
    assert run_parameters(given, {}, FLOW_RUN)["run"]["name"] == "mine"


def test_a_run_that_cannot_be_is_refused_by_the_name_of_its_field():
    with pytest.raises(RunConfigError, match=r"slice\.accelerator_type: unknown accelerator type 'v4-9'"):
        run_parameters(
            {"run": {"name": "x", "command": "true", "slice": {"accelerator_type": "v4-9"}}}, {}, FLOW_RUN
        )


@pytest.mark.parametrize(
    ("changes", "pool", "said"),
    [
        ("steps=3", {}, "changes"),
        ([["steps", 3]], {}, "changes"),
        ({}, {"slice": "v4-8"}, "slice of the work pool"),
        ({}, {"budget": 3}, "budget of the work pool"),
        ({}, {"secrets": ["TOKEN"]}, "secrets of the work pool"),
    ],
)
def test_what_is_no_mapping_is_refused_and_never_a_crash(changes: object, pool: dict[str, Any], said: str):
    """A flow run that crashes is started again by an automation, in vain."""
    with pytest.raises(RunConfigError, match=f"^{said}: a mapping of fields to values is wanted"):
        run_parameters({"run": {"name": "x", "command": "true"}, "changes": changes}, pool, FLOW_RUN)


def test_other_flows_keep_their_parameters():
    assert run_parameters({"pool": "all"}, POOL, FLOW_RUN) == {"pool": "all"}
