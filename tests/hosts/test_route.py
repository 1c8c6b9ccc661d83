"""The way to a host, by table."""

from __future__ import annotations

import pytest

from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.route import Jump, Route, RouteError, route_to

HOST = HostAddress("s", 1, "10.0.0.2", "34.1.2.3", "ssh-ed25519 AAAA", zone="us-east5-b", hostname="t1v-w-1")
INSIDE = HostAddress("s", 0, "10.0.0.1")


def connection(route: str) -> Connection:
    return Connection("project", "gs://b", ssh_port=2222, ssh_route=route)


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("external", Route("34.1.2.3", 2222)),
        ("internal", Route("10.0.0.2", 2222)),
        ("jump:ann@gate:2200", Route("10.0.0.2", 2222, jump=Jump("ann", "gate", 2200))),
        ("jump:ann@gate", Route("10.0.0.2", 2222, jump=Jump("ann", "gate", 22))),
        ("jump:ann@[::1]:23", Route("10.0.0.2", 2222, jump=Jump("ann", "::1", 23))),
        ("nc -X 5 %h %p", Route("10.0.0.2", 2222, command=("nc", "-X", "5", "10.0.0.2", "2222"))),
        ("sh -c 'nc %h %p' 100%%", Route("10.0.0.2", 2222, command=("sh", "-c", "nc 10.0.0.2 2222", "100%"))),
    ],
)
def test_V14_each_route_leads_to_the_host(route: str, expected: Route) -> None:
    assert route_to(HOST, connection(route)) == expected


def test_V14_iap_goes_by_name_and_zone() -> None:
    command = " ".join(route_to(HOST, connection("iap")).command)
    assert command.startswith("gcloud compute start-iap-tunnel t1v-w-1 2222 --listen-on-stdin")
    assert "--project=project --zone=us-east5-b" in command


@pytest.mark.parametrize(
    ("route", "says"),
    [
        ("external", "TPU_RELAY_SSH_ROUTE to internal"),
        ("iap", "host name of s-w0"),
        ("jump:gate", "jump:user@host:port"),
        ("nonsense", "ProxyCommand"),
    ],
)
def test_V14_a_route_that_cannot_lead_there_says_what_to_set(route: str, says: str) -> None:
    with pytest.raises(RouteError, match=says):
        route_to(INSIDE, connection(route))
