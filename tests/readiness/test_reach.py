"""Which firewall rules let SSH in."""

from __future__ import annotations

import pytest

from tpu.cloud.project import FirewallRule
from tpu.readiness.finding import State
from tpu.readiness.reach import firewall, open_sources

SSH = (("tcp", ("22",)),)


def rule(*sources: str, allows: bool = True, priority: int = 1000, protocols=SSH, targeted: bool = False):
    return FirewallRule("r", allows, priority, sources, protocols, targeted)


@pytest.mark.parametrize(
    ("rules", "sources"),
    [
        ([], []),
        ([rule("0.0.0.0/0")], ["0.0.0.0/0"]),
        ([rule("0.0.0.0/0", protocols=(("tcp", ("80", "443")),))], []),
        ([rule("10.0.0.0/8", protocols=(("tcp", ("0-65535",)), ("udp", ())))], ["10.0.0.0/8"]),
        ([rule("10.0.0.0/8", protocols=(("all", ()),))], ["10.0.0.0/8"]),
        ([rule("0.0.0.0/0", protocols=(("icmp", ()),))], []),
        # A slice has no tags.
        ([rule("0.0.0.0/0", targeted=True)], []),
        # A denial counts before what has a higher number, or the same.
        ([rule("192.0.2.0/24"), rule("0.0.0.0/0", allows=False, priority=900)], []),
        ([rule("192.0.2.0/24"), rule("0.0.0.0/0", allows=False, priority=1000)], []),
        ([rule("192.0.2.0/24"), rule("0.0.0.0/0", allows=False, priority=1100)], ["192.0.2.0/24"]),
        ([rule("192.0.2.0/24"), rule("198.51.100.0/24", allows=False, priority=1)], ["192.0.2.0/24"]),
        ([rule("2001:db8::/32")], ["2001:db8::/32"]),
    ],
)
def test_from_where_ssh_is_open(rules: list[FirewallRule], sources: list[str]):
    assert open_sources(rules, 22) == sources


@pytest.mark.parametrize(
    ("route", "source", "reaches"),
    [
        ("external", "0.0.0.0/0", True),
        ("external", "192.0.2.7/32", True),
        ("external", "10.128.0.0/9", False),
        ("external", "35.235.240.0/20", False),
        ("internal", "10.128.0.0/9", True),
        ("internal", "0.0.0.0/0", True),
        ("internal", "192.0.2.7/32", False),
        ("internal", "35.235.240.0/20", False),
        ("jump:me@bastion", "10.128.0.0/9", True),
        ("iap", "35.235.240.0/20", True),
        ("iap", "0.0.0.0/0", True),
        ("iap", "35.235.240.0/24", False),
        ("external", "2001:db8::/32", True),
        ("internal", "2001:db8::/32", False),
    ],
)
def test_which_source_is_what_a_route_needs(route: str, source: str, reaches: bool):
    found = firewall("firewall", [rule(source)], route, 22, "p", "default")
    assert (found.state is State.HOLDS) == reaches
