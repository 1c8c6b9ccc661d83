"""What can be found wrong with a wish before anything is made, told in one error."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tpu.cloud import CloudError, ErrorKind, TpuCloud
from tpu.connection import Connection
from tpu.hosts.address import HostAddress
from tpu.hosts.route import RouteError, route_to
from tpu.slices.candidate import Candidate
from tpu.slices.grant import GrantError, parse_grant
from tpu.slices.provision import check_offered
from tpu.slices.regions import BucketHome, crossing
from tpu.slices.request import SliceRequest

Problem = tuple[ErrorKind, str]


@dataclass(frozen=True)
class Traffic:
    """What a run moves between slice and bucket: GB of a checkpoint if it is known, and how many are planned."""

    checkpoint_gb: float | None
    checkpoints: int


async def preflight(
    cloud: TpuCloud,
    candidates: Sequence[Candidate],
    request: SliceRequest,
    connection: Connection,
    home: BucketHome | None,
    allow_regions: Collection[str],
    traffic: Traffic,
) -> None:
    """Look whether all candidates can be what is wanted. `home` is None if nobody may say where the bucket is.

    Raises:
        CloudError: one error for all that is wrong; BAD_REQUEST if it is the configuration, or the kind of the cloud's
            own refusal.
    """
    problems = settings_problems(candidates, request, connection, home, allow_regions, traffic)
    if not problems:  # what the settings forbid nobody need be asked about
        problems = await _offer_problems(cloud, candidates, request)
    if problems:
        kind = problems[0][0]
        raise CloudError(kind, 0, "; ".join(text for _, text in problems), wanted="get a slice")


def settings_problems(
    candidates: Sequence[Candidate],
    request: SliceRequest,
    connection: Connection,
    home: BucketHome | None,
    allow_regions: Collection[str],
    traffic: Traffic,
    find_program: Callable[[str], str | None] = shutil.which,
) -> list[Problem]:
    """What is wrong with the settings, without asking the cloud."""
    found = list(_route_problems(request, connection, find_program))
    try:
        grant = parse_grant(connection.grant) if connection.grant else None
    except GrantError as error:
        grant = None
        found.append(str(error))
    for candidate in candidates:
        if grant is not None and (why := grant.why_not(candidate)):
            found.append(f"{candidate}: {why}")
        if home is not None and (why := region_problem(candidate, home, allow_regions, traffic)):
            found.append(why)
    return [(ErrorKind.BAD_REQUEST, text) for text in found]


def region_problem(
    candidate: Candidate, home: BucketHome, allow_regions: Collection[str], traffic: Traffic
) -> str | None:
    """Why a candidate must not be used with a bucket elsewhere, with what that would cost; None if it may."""
    costs = crossing(home, candidate.region)
    if costs is None or not costs.abroad or candidate.region in allow_regions:
        return None
    price = f"about ${costs.read:.2f} a GB, for each checkpoint that is saved or restored"
    if traffic.checkpoint_gb is not None:
        each = costs.dollars(0.0, traffic.checkpoint_gb)
        price += (
            f" (${each:.4g} for one of {traffic.checkpoint_gb:.3g} GB, ${each * traffic.checkpoints:.4g} for all "
            f"{traffic.checkpoints})"
        )
    return (
        f"{candidate}: the bucket is in {home.name.lower()}, and traffic to {candidate.region} costs {price}; take a "
        f"candidate or a bucket of one region, or allow it by name: slice.allow_regions=[{candidate.region}]"
    )


def _route_problems(
    request: SliceRequest, connection: Connection, find_program: Callable[[str], str | None]
) -> list[str]:
    """Why no host could be reached, whatever it is."""
    if connection.ssh_route == "external" and not request.external_ips:
        return [
            "slice.external_ips is false, but hosts are reached at external addresses: set TPU_RELAY_SSH_ROUTE to "
            "internal (from the same network), iap (needs gcloud) or jump:user@host:port, or external_ips to true"
        ]
    host = HostAddress("slice", 0, "10.0.0.1", "192.0.2.1", None, request.zone, "host")
    try:
        route = route_to(host, connection)
    except RouteError as error:
        return [str(error)]
    if route.command and find_program(route.command[0]) is None:
        return [
            f"TPU_RELAY_SSH_ROUTE={connection.ssh_route} starts {route.command[0]}, which is not on this machine: "
            "install it, or choose another route"
        ]
    return []


async def _offer_problems(
    cloud: TpuCloud, candidates: Sequence[Candidate], request: SliceRequest
) -> list[Problem]:
    """What the zones do not have.

    Raises:
        CloudError: it cannot be asked.
    """
    asked = {(one.zone, one.accelerator_type): request.of(one) for one in candidates}
    answers = await asyncio.gather(
        *(check_offered(cloud, one) for one in asked.values()), return_exceptions=True
    )
    problems: list[Problem] = []
    for answer in answers:
        if isinstance(answer, CloudError) and answer.permanent:
            problems.append((answer.kind, answer.message))
        elif isinstance(answer, BaseException):
            raise answer
    return problems
