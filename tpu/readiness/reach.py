"""Whether hosts can be reached by SSH on the chosen route, and reach the bucket themselves."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network

from tpu.cloud.project import FirewallRule, GoogleProject, ProjectUnknown, Why
from tpu.connection import Connection
from tpu.readiness.finding import Finding, good, not_told, wrong
from tpu.slices.request import SliceRequest

# From where Identity-Aware Proxy forwards TCP.
IAP_SOURCE = "35.235.240.0/20"
_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_DEFAULT = "default"

Network = IPv4Network | IPv6Network


async def reach(
    project: GoogleProject, connection: Connection, request: SliceRequest, regions: Sequence[str]
) -> list[Finding]:
    """Network, firewall and OS Login; for hosts without external addresses also their way to Google."""
    name, network = connection.project, request.network or _DEFAULT
    found = [await _network(project, name, network), await _os_login(project, name)]
    what = f"firewall of {network}"
    try:
        rules = await project.firewall(network)
    except ProjectUnknown as error:
        found.append(not_told(what, error, name))
    else:
        found.append(firewall(what, rules, connection.ssh_route, connection.ssh_port, name, network))
    if not request.external_ips:
        subnetwork = request.subnetwork or network
        found += [
            await _private_access(project, name, region, subnetwork) for region in dict.fromkeys(regions)
        ]
    return found


async def _network(project: GoogleProject, name: str, network: str) -> Finding:
    what = "network"
    try:
        await project.check_network(network)
    except ProjectUnknown as error:
        if error.why is Why.NOT_THERE:
            mend = f"gcloud compute networks create {network} --project={name} --subnet-mode=auto"
            return wrong(what, f"there is no network {network}: name another in slice.network", mend)
        return not_told(what, error, name)
    return good(what, network)


async def _os_login(project: GoogleProject, name: str) -> Finding:
    what = "OS Login"
    try:
        on = (await project.compute()).os_login
    except ProjectUnknown as error:
        return not_told(what, error, name)
    if on:
        mend = f"gcloud compute project-info add-metadata --project={name} --metadata=enable-oslogin=FALSE"
        return wrong(
            what, "it is on for the project, and then hosts do not take the keys that runs put there", mend
        )
    return good(what, "off, so that hosts take a run's key")


async def _private_access(project: GoogleProject, name: str, region: str, subnetwork: str) -> Finding:
    what = f"Private Google Access of {subnetwork} in {region}"
    try:
        on = await project.reaches_google(region, subnetwork)
    except ProjectUnknown as error:
        if error.why is Why.NOT_THERE:
            return wrong(what, "there is no such subnetwork: name one in slice.subnetwork")
        return not_told(what, error, name)
    if not on:
        mend = (
            f"gcloud compute networks subnets update {subnetwork} --project={name} --region={region} "
            "--enable-private-ip-google-access"
        )
        return wrong(what, "it is off, and hosts without external addresses cannot reach the bucket", mend)
    return good(what, "on: hosts without external addresses reach the bucket")


def firewall(
    what: str, rules: Sequence[FirewallRule], route: str, port: int, project: str, network: str
) -> Finding:
    """Whether a rule lets in what comes by the route. Pure.

    Rules for VMs with certain tags do not count, since slices have none. Policies of an organization are not seen.
    """
    sources = [ip_network(one) for one in open_sources(rules, port)]
    if route == "iap":
        fitting = [one for one in sources if _inside(ip_network(IAP_SOURCE), one)]
        wanted, rule = IAP_SOURCE, "relay-ssh-iap"
    elif route == "external":
        fitting = [one for one in sources if not _inside(one, ip_network(IAP_SOURCE)) and not _private(one)]
        wanted, rule = "YOUR-ADDRESS/32", "relay-ssh"
    else:
        fitting = [
            one for one in sources if any(one.overlaps(private) for private in _PRIVATE if one.version == 4)
        ]
        wanted, rule = "10.0.0.0/8", "relay-ssh-internal"
    if fitting:
        return good(
            what, f"TCP port {port} is open from {', '.join(map(str, fitting))}, for the route {route}"
        )
    mend = (
        f"gcloud compute firewall-rules create {rule} --project={project} --network={network} --direction=INGRESS "
        f"--allow=tcp:{port} --source-ranges={wanted}"
    )
    return wrong(what, f"no rule lets TCP port {port} in by the route {route} (TPU_RELAY_SSH_ROUTE)", mend)


def open_sources(rules: Sequence[FirewallRule], port: int) -> list[str]:
    """From where a TCP port is open on VMs without tags: of two rules the one of the lower priority number counts."""
    found: list[str] = []
    denied: list[Network] = []
    # A denial goes before a permission of the same number.
    for rule in sorted(rules, key=lambda one: (one.priority, one.allows)):
        if rule.targeted or not rule.matches("tcp", port):
            continue
        if rule.allows:
            found += [one for one in rule.sources if not any(_inside(ip_network(one), no) for no in denied)]
        else:
            denied += [ip_network(one) for one in rule.sources]
    return list(dict.fromkeys(found))


def _inside(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network) and isinstance(outer, IPv4Network):
        return inner.subnet_of(outer)
    return isinstance(inner, IPv6Network) and isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def _private(network: Network) -> bool:
    return any(_inside(network, one) for one in _PRIVATE)
