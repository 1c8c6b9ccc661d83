"""What Google says of a project's set-up: rights, quota, network. Asks and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

from google.api_core import exceptions as api_exceptions
from google.auth.exceptions import GoogleAuthError

from tpu.cloud.rest import RestApi


class Why(Enum):
    """Why something could not be learned."""

    API_OFF = "the API is off"
    DENIED = "no right to ask"
    NOT_THERE = "it is not there"
    NO_CREDENTIALS = "the credentials cannot be used"
    AWAY = "no usable answer"


class ProjectUnknown(Exception):
    """A service would not say; `service` is its first name, such as compute."""

    def __init__(self, why: Why, service: str, message: str) -> None:
        super().__init__(f"{why.value}: {message}")
        self.why = why
        self.service = service


@dataclass(frozen=True)
class ComputeProject:
    """What Compute Engine says of a project. `default_account` is the service account of VMs that name none."""

    default_account: str | None
    os_login: bool


@dataclass(frozen=True)
class FirewallRule:
    """One rule for traffic to VMs. `targeted` is True if it is for VMs with certain tags or accounts only."""

    name: str
    allows: bool
    priority: int
    sources: tuple[str, ...]
    protocols: tuple[tuple[str, tuple[str, ...]], ...]
    targeted: bool

    def matches(self, protocol: str, port: int) -> bool:
        """Whether the rule is about this port; one without ports is about all."""
        for name, ports in self.protocols:
            if name in (protocol, "all") and (not ports or any(_within(port, one) for one in ports)):
                return True
        return False


@dataclass(frozen=True)
class Quota:
    """A limit of the Cloud TPU API in some places (zones or regions); None is no limit."""

    name: str
    places: frozenset[str]
    limit: int | None


class GoogleProject:
    """Each method raises ProjectUnknown if it is not told."""

    def __init__(self, api: RestApi, project: str) -> None:
        self._api = api
        self._project = project

    async def date_s(self) -> float | None:
        """The time at Google, in seconds of the epoch, to the second."""
        try:
            date = await self._api.date()
        except (api_exceptions.GoogleAPICallError, GoogleAuthError) as error:
            raise _unknown(error, "tpu") from error
        return parsedate_to_datetime(date).timestamp() if date else None

    async def missing_permissions(self, wanted: Sequence[str]) -> list[str]:
        """Those of the permissions on the project that we do not have."""
        path = f"v1/projects/{self._project}:testIamPermissions"
        granted = (await self._test("cloudresourcemanager", path, wanted)).get("permissions", ())
        return [one for one in wanted if one not in granted]

    async def may_act_as(self, account: str) -> bool:
        """Whether we may let VMs run as a service account."""
        wanted = ["iam.serviceAccounts.actAs"]
        found = await self._test("iam", f"v1/projects/-/serviceAccounts/{account}:testIamPermissions", wanted)
        return found.get("permissions") == wanted

    async def quotas(self) -> list[Quota]:
        """All limits of the Cloud TPU API."""
        path = f"v1/projects/{self._project}/locations/global/services/tpu.googleapis.com/quotaInfos"
        found: list[Quota] = []
        for info in await self._pages("cloudquotas", path, "quotaInfos", pageSize="500"):
            for place in info.get("dimensionsInfos", ()):
                dimensions = place.get("dimensions", {})
                named = {dimensions[kind] for kind in ("zone", "region") if kind in dimensions}
                value = int(place.get("details", {}).get("value", 0))
                found.append(
                    Quota(
                        info.get("quotaId", ""),
                        frozenset(named or place.get("applicableLocations", ())),
                        None if value < 0 else value,
                    )
                )
        return found

    async def compute(self) -> ComputeProject:
        found = await self._ask("compute", "GET", f"v1/projects/{self._project}")
        items = {
            one["key"]: one.get("value", "")
            for one in found.get("commonInstanceMetadata", {}).get("items", ())
        }
        return ComputeProject(
            found.get("defaultServiceAccount"),
            items.get("enable-oslogin", "").upper() in ("TRUE", "1", "YES"),
        )

    async def check_network(self, network: str) -> None:
        """Raises ProjectUnknown of NOT_THERE if there is no such network."""
        await self._ask("compute", "GET", f"v1/{self._path(network, 'global/networks')}")

    async def firewall(self, network: str) -> list[FirewallRule]:
        """The rules in force for traffic to the VMs of a network."""
        path = f"v1/{self._path(network, 'global/networks').partition('/global/')[0]}/global/firewalls"
        rules = await self._pages("compute", path, "items", maxResults="500")
        return [
            _rule(one)
            for one in rules
            if one.get("direction", "INGRESS") == "INGRESS"
            and not one.get("disabled")
            and one.get("network", "").rpartition("/")[2] == network.rpartition("/")[2]
        ]

    async def reaches_google(self, region: str, subnetwork: str) -> bool:
        """Whether VMs of a subnetwork that have no external address reach Google's services."""
        path = f"v1/{self._path(subnetwork, f'regions/{region}/subnetworks')}"
        return bool((await self._ask("compute", "GET", path)).get("privateIpGoogleAccess"))

    def _path(self, name: str, folder: str) -> str:
        """A resource by its short name, or by its whole path if it is another project's."""
        whole = re.search(r"projects/.*", name)
        return whole[0] if whole else f"projects/{self._project}/{folder}/{name}"

    async def _test(self, service: str, path: str, permissions: Sequence[str]) -> dict[str, Any]:
        return await self._ask(service, "POST", path, body={"permissions": list(permissions)})

    async def _pages(self, service: str, path: str, items: str, **query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            more = {"pageToken": token} if token else {}
            content = await self._ask(service, "GET", path, **query, **more)
            found += content.get(items, ())
            if not (token := content.get("nextPageToken", "")):
                return found

    async def _ask(self, service: str, verb: str, path: str, body: Any = None, **query: str) -> Any:
        try:
            return (await self._api.ask(service, verb, path, query, body)) or {}
        except (api_exceptions.GoogleAPICallError, GoogleAuthError) as error:
            raise _unknown(error, service) from error


def _unknown(error: api_exceptions.GoogleAPICallError | GoogleAuthError, service: str) -> ProjectUnknown:
    if isinstance(error, GoogleAuthError):
        return ProjectUnknown(Why.NO_CREDENTIALS, service, str(error))
    return ProjectUnknown(_why(error), service, error.message or str(error))


def _why(error: api_exceptions.GoogleAPICallError) -> Why:
    if isinstance(error, api_exceptions.NotFound):
        return Why.NOT_THERE
    if isinstance(error, api_exceptions.Unauthorized):
        return Why.NO_CREDENTIALS
    if isinstance(error, api_exceptions.Forbidden):
        return Why.API_OFF if is_off(error.message or "", error.reason) else Why.DENIED
    return Why.AWAY


def is_off(message: str, reason: str | None = None) -> bool:
    """Whether a refusal says that its API is not turned on in the project."""
    return (
        reason == "SERVICE_DISABLED" or "has not been used in project" in message or "is disabled" in message
    )


def _rule(values: dict[str, Any]) -> FirewallRule:
    allowed, denied = values.get("allowed", ()), values.get("denied", ())
    return FirewallRule(
        values.get("name", ""),
        bool(allowed),
        int(values.get("priority", 1000)),
        tuple(values.get("sourceRanges", ())),
        tuple((one.get("IPProtocol", ""), tuple(one.get("ports", ()))) for one in allowed or denied),
        bool(values.get("targetTags") or values.get("targetServiceAccounts")),
    )


def _within(port: int, ports: str) -> bool:
    first, _, last = ports.partition("-")
    return int(first) <= port <= int(last or first)
