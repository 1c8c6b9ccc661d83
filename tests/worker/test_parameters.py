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


def test_what_only_the_form_filled_in_is_the_pools_to_say():
    """The form of the UI sends every field; those that nobody touched have the model's default."""
    stated: dict[str, Any] = {
        "name": "icl",
        "command": ["true"],
        "slice": {"accelerator_type": "v4-8", "price_an_hour": 4.0},
    }
    sent = RunConfig.model_validate(stated | {"budget": {"user_failure": 0}}).model_dump(mode="json")
    done = run_parameters({"run": sent}, {"run": stated}, POOL, FLOW_RUN)["run"]
    assert (done["slice"]["accelerator_type"], done["slice"]["zone"]) == ("v4-8", "us-central2-b")
    assert done["budget"] == {"infrastructure": 5, "user_failure": 0}
    assert done["max_cost"] == 9.0
    # Said twice, by the deployment: also a default is an answer.
    pool = POOL | {"slice": POOL["slice"] | {"zone": "us-east1-d"}}
    stated["slice"]["zone"] = "us-central2-b"
    for deployed, zone in (({}, "us-east1-d"), ({"run": stated}, "us-central2-b")):
        assert run_parameters({"run": sent}, deployed, pool, FLOW_RUN)["run"]["slice"]["zone"] == zone


def test_changes_are_made_and_a_fresh_name_is_given_once():
    given = {
        "run": {"name": "a-name-that-is-as-long-as-a-name-may-be-x", "command": "true"},
        "changes": {"slice.zone": "us-east1-d", "steps": 5}, "fresh_name": True, "take_over": False,
    }  # fmt: skip
    given["run"]["name"] = given["run"]["name"][:40]
    done = run_parameters(given, {}, POOL, FLOW_RUN)
    assert done["run"]["name"] == "a-name-that-is-as-long-as-a-nam-0f1e2d3c"
    assert (done["run"]["slice"]["zone"], done["run"]["steps"]) == ("us-east1-d", 5)


def test_a_name_that_somebody_gave_is_kept():
    given = {"run": {"name": "icl", "command": "true"}, "changes": {"name": "mine"}, "fresh_name": True}
    assert run_parameters(given, {}, {}, FLOW_RUN)["run"]["name"] == "mine"


def test_a_run_that_cannot_be_is_refused_by_the_name_of_its_field():
    with pytest.raises(RunConfigError, match=r"slice\.accelerator_type: unknown accelerator type 'v4-9'"):
        run_parameters(
            {"run": {"name": "x", "command": "true", "slice": {"accelerator_type": "v4-9"}}}, {}, {}, FLOW_RUN
        )


def test_other_flows_keep_their_parameters():
    assert run_parameters({"pool": "all"}, {}, POOL, FLOW_RUN) == {"pool": "all"}
