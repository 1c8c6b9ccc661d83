"""What other services of Google say of the project: rights, quota, network. Only what a preflight asks them for.

They are served under the address of the REST form, a folder a service: `/compute/v1/projects/…` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.rpc import error_details_pb2

from tpu.emulator import errors, zones
from tpu.emulator.capacity import Limits
from tpu.emulator.errors import ApiError
from tpu.topology import ACCELERATOR_TYPES

NUMBER = "123456789012"
DEFAULT_ACCOUNT = f"{NUMBER}-compute@developer.gserviceaccount.com"
NETWORK = "default"
# The quota, in chips, of what nobody has limited.
AMPLE_CHIPS = 4096

# Emulated hosts have a port of their own for SSH, since that of this machine is its own.
_SSH_PORTS = ["22", "1024-65535"]

_TITLES = {
    "tpu.googleapis.com": "Cloud TPU API",
    "compute.googleapis.com": "Compute Engine API",
    "cloudresourcemanager.googleapis.com": "Cloud Resource Manager API",
    "iam.googleapis.com": "Identity and Access Management (IAM) API",
    "cloudquotas.googleapis.com": "Cloud Quotas API",
}
_NEEDED = {
    "ListNodes": "tpu.nodes.list",
    "GetNode": "tpu.nodes.get",
    "CreateNode": "tpu.nodes.create",
    "DeleteNode": "tpu.nodes.delete",
    "UpdateNode": "tpu.nodes.update",
}


@dataclass(frozen=True)
class Project:
    """How the project is set up. Everything is right at first, as in a project that was made by the book.

    `missing` are permissions that the caller does not have. `ssh_from` are the sources that may reach port 22.
    """

    apis_off: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    os_login: bool = False
    ssh_from: tuple[str, ...] = ("0.0.0.0/0",)
    private_access: bool = True
    clock_ahead_s: float = 0.0


def check_known_apis(names: Collection[str]) -> None:
    """Refuse a name that no served API has, so that a mistyped one does not pass for one that is off."""
    if unknown := sorted(set(names) - set(_TITLES)):
        raise ValueError(f"unknown API {unknown[0]!r}; known: {', '.join(sorted(_TITLES))}")


def check_call(project: Project, method: str) -> None:
    """Refuse a call of the Cloud TPU API that the project's set-up does not allow.

    Raises:
        ApiError: of code 7.
    """
    _check_on(project, "tpu.googleapis.com")
    if (permission := _NEEDED.get(method)) in project.missing:
        raise _denied(str(permission))


def answer(
    project: Project, limits: Limits, name: str, verb: str, path: str, body: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The answer of one of the other services for the project called `name`; None if it is none of theirs.

    Raises:
        ApiError: it is refused.
    """
    for service, asked, pattern, handler in _ROUTES:
        if verb == asked and (match := re.fullmatch(f"/{service}/{pattern}", path)):
            _check_on(project, f"{service}.googleapis.com")
            words = match.groupdict()
            if words.get("project", name) != name:
                raise errors.project_denied(words["project"])
            return handler(_Call(project, limits, words, body))
    return None


@dataclass(frozen=True)
class _Call:
    project: Project
    limits: Limits
    words: Mapping[str, str]
    body: Mapping[str, Any]

    def need(self, permission: str) -> None:
        if permission in self.project.missing:
            raise _denied(permission)


def _compute_project(call: _Call) -> dict[str, Any]:
    call.need("compute.projects.get")
    items = [{"key": "enable-oslogin", "value": "TRUE"}] if call.project.os_login else []
    return {
        "kind": "compute#project", "name": call.words["project"], "defaultServiceAccount": DEFAULT_ACCOUNT,
        "commonInstanceMetadata": {"items": items} if items else {},
    }  # fmt: skip


def _network(call: _Call) -> dict[str, Any]:
    call.need("compute.networks.get")
    if call.words["network"] != NETWORK:
        raise errors.not_found(f"projects/{call.words['project']}/global/networks/{call.words['network']}")
    return {"kind": "compute#network", "name": NETWORK, "autoCreateSubnetworks": True}


def _firewalls(call: _Call) -> dict[str, Any]:
    call.need("compute.firewalls.list")
    network = (
        f"https://www.googleapis.com/compute/v1/projects/{call.words['project']}/global/networks/{NETWORK}"
    )
    common = {"kind": "compute#firewall", "network": network, "direction": "INGRESS", "disabled": False}
    rules = [
        {**common, "name": f"ssh-{number}", "priority": 65534, "sourceRanges": [source],
         "allowed": [{"IPProtocol": "tcp", "ports": _SSH_PORTS}]}
        for number, source in enumerate(call.project.ssh_from)
    ]  # fmt: skip
    icmp = {
        "name": "icmp",
        "priority": 65534,
        "sourceRanges": ["0.0.0.0/0"],
        "allowed": [{"IPProtocol": "icmp"}],
    }
    return {"kind": "compute#firewallList", "items": [*rules, {**common, **icmp}]}


def _subnetwork(call: _Call) -> dict[str, Any]:
    call.need("compute.subnetworks.get")
    if call.words["subnetwork"] != NETWORK:
        raise errors.not_found(f"regions/{call.words['region']}/subnetworks/{call.words['subnetwork']}")
    return {"name": NETWORK, "privateIpGoogleAccess": call.project.private_access}


def _granted(call: _Call) -> dict[str, Any]:
    asked = list(call.body.get("permissions", ()))
    granted = [one for one in asked if one not in call.project.missing]
    return {"permissions": granted} if granted else {}


def _granted_on_account(call: _Call) -> dict[str, Any]:
    if "@" not in call.words["account"] or call.words["account"].startswith("nobody@"):
        raise errors.not_found(f"projects/-/serviceAccounts/{call.words['account']}")
    return _granted(call)


def _quotas(call: _Call) -> dict[str, Any]:
    call.need("cloudquotas.quotas.get")
    return {"quotaInfos": list(_quota_infos(call.limits))}


def _quota_infos(limits: Limits) -> Iterator[dict[str, Any]]:
    """A quota a generation and kind of provisioning, with its value in each zone, in chips."""
    for generation in dict.fromkeys(kind.generation for kind in ACCELERATOR_TYPES.values()):
        kinds = [kind for kind in ACCELERATOR_TYPES.values() if kind.generation == generation]
        for preemptible in (False, True):
            places = []
            for zone in (zone for zone, offered in zones.GENERATIONS.items() if generation in offered):
                limited = [
                    limits.quota[zone, kind.name] * kind.chips
                    for kind in kinds
                    if (zone, kind.name) in limits.quota
                ]
                value = max(limited, default=AMPLE_CHIPS)
                places.append({"dimensions": {"zone": zone}, "details": {"value": str(value)},
                               "applicableLocations": [zone]})  # fmt: skip
            yield {
                "quotaId": zones.quota_name(kinds[0], preemptible=preemptible), "service": "tpu.googleapis.com",
                "dimensions": ["zone"], "dimensionsInfos": places,
            }  # fmt: skip


_Handler = Callable[[_Call], dict[str, Any]]
_OF_PROJECT = "projects/(?P<project>[^/:]+)"
_ROUTES: tuple[tuple[str, str, str, _Handler], ...] = (
    # gcloud asks for the first one too: are there SSH keys of the whole project?
    ("compute", "GET", f"[^/]+/{_OF_PROJECT}", _compute_project),
    ("compute", "GET", f"v1/{_OF_PROJECT}/global/networks/(?P<network>[^/]+)", _network),
    ("compute", "GET", f"v1/{_OF_PROJECT}/global/firewalls", _firewalls),
    ("compute", "GET", f"v1/{_OF_PROJECT}/regions/(?P<region>[^/]+)/subnetworks/(?P<subnetwork>[^/]+)", _subnetwork),
    ("cloudresourcemanager", "POST", f"v1/{_OF_PROJECT}:testIamPermissions", _granted),
    ("iam", "POST", "v1/projects/-/serviceAccounts/(?P<account>[^/:]+):testIamPermissions", _granted_on_account),
    ("cloudquotas", "GET", f"v1/{_OF_PROJECT}/locations/global/services/tpu.googleapis.com/quotaInfos", _quotas),
)  # fmt: skip


def _check_on(project: Project, api: str) -> None:
    if api in project.apis_off:
        raise ApiError(
            7,
            f"{_TITLES[api]} has not been used in project {NUMBER} before or it is disabled. Enable it by visiting "
            f"https://console.developers.google.com/apis/api/{api}/overview?project={NUMBER} then retry. If you "
            "enabled this API recently, wait a few minutes for the action to propagate to our systems and retry.",
            [
                error_details_pb2.ErrorInfo(
                    reason="SERVICE_DISABLED", domain="googleapis.com", metadata={"service": api}
                )
            ],
        )


def _denied(permission: str) -> ApiError:
    return ApiError(
        7,
        f"Permission '{permission}' denied on resource (or it may not exist).",
        [
            error_details_pb2.ErrorInfo(
                reason="IAM_PERMISSION_DENIED",
                domain="iam.googleapis.com",
                metadata={"permission": permission},
            )
        ],
    )
