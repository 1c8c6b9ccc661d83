"""A project that is set up wrongly on demand: what Google's services refuse then, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tpu.emulator.__main__ import main
from tpu.emulator.client import ControlError
from tpu.emulator.emulator import Emulator

NODES = "v2/projects/relay-emulated/locations/us-central2-b/nodes"


def ask(emulator: Emulator, path: str, body: Any = None) -> tuple[int, Any]:
    """HTTP status and JSON of the answer."""
    answer = requests.request(
        "GET" if body is None else "POST",
        f"{emulator.env['TPU_RELAY_REST_ENDPOINT']}/{path}",
        json=body,
        headers={"Authorization": f"Bearer {emulator.env['TPU_RELAY_API_KEY']}"},
        timeout=10,
    )
    return answer.status_code, answer.json()


def test_by_command_an_api_is_turned_off_and_on(emulator: Emulator):
    project = ["project", "--state", str(emulator.state_dir)]
    assert main([*project, "--api-off", "tpu.googleapis.com"]) == 0
    status, content = ask(emulator, NODES)
    assert (status, content["error"]["status"]) == (403, "PERMISSION_DENIED")
    assert content["error"]["message"].startswith(
        "Cloud TPU API has not been used in project 123456789012 before"
    )
    assert content["error"]["details"][0]["reason"] == "SERVICE_DISABLED"
    assert main(project) == 0
    assert ask(emulator, NODES) == (200, {})


def test_permissions_are_told_and_refused_alike(emulator: Emulator):
    emulator.set_project(missing=["tpu.nodes.list"])
    assert ask(emulator, NODES)[0] == 403
    asked = {"permissions": ["tpu.nodes.list", "tpu.nodes.get"]}
    told = ask(emulator, "cloudresourcemanager/v1/projects/relay-emulated:testIamPermissions", asked)
    assert told == (200, {"permissions": ["tpu.nodes.get"]})


def test_a_quota_is_told_as_it_is_kept(emulator: Emulator):
    emulator.set_quota("us-central2-b", "v4-8", 2)
    path = "cloudquotas/v1/projects/relay-emulated/locations/global/services/tpu.googleapis.com/quotaInfos"
    infos = {one["quotaId"]: one for one in ask(emulator, path)[1]["quotaInfos"]}
    (place,) = infos["TPUV4sPreemptiblePerProjectPerRegionForTPUAPI"]["dimensionsInfos"]
    assert (place["dimensions"], place["details"]) == ({"zone": "us-central2-b"}, {"value": "8"})


def test_what_is_unknown_is_refused(emulator: Emulator):
    with pytest.raises(ControlError, match=r"unknown API 'tpus\.googleapis\.com'; known: "):
        emulator.set_project(apis_off=["tpus.googleapis.com"])
    assert ask(emulator, "compute/v1/projects/another/global/firewalls")[0] == 403
    assert ask(emulator, "compute/v1/projects/relay-emulated/global/networks/mine")[0] == 404
