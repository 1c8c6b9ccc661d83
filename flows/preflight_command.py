"""`relay preflight`: whether the project is ready for runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tpu.readiness.finding import Finding


def preflight(
    config: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="the run configuration whose slices are wanted")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="change a field, such as slice.zone=us-east5-a"),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="a Prefect work pool that must be there, with a worker online")
    ] = None,
) -> None:
    """Look whether runs can start: what is wrong, a line each, and the command that mends it; exits 1 if something is.

    Credentials, clock, API, rights, service account, quota, offers of the zones, bucket, network, firewall, Prefect.
    Nothing is made but one small object in the bucket, which is deleted. Without a file the slice is v4-8 in
    us-central2-b; change it with --set.
    """
    from tpu.connection import Connection
    from tpu.readiness.finding import any_wrong
    from tpu.readiness.look import Wish, look
    from tpu.runs.config import apply_changes, load_run_config, parse_changes, parse_run_config
    from tpu.slices.request import SliceRequest

    wanted = parse_changes(changes or [])
    if config is not None:
        run = load_run_config(config, wanted)
    else:
        values = {"name": "preflight", "command": ["true"]}
        apply_changes(values, wanted)
        run = parse_run_config(values)
    place, first = run.slice, run.slice.choices[0]
    request = SliceRequest(
        first.zone, first.accelerator_type, first.provisioning, place.runtime_version, network=place.network,
        subnetwork=place.subnetwork, external_ips=place.external_ips, service_account=place.service_account,
    )  # fmt: skip
    wish = Wish(place.choices, request, tuple(place.allow_regions))

    async def everything() -> list[Finding]:
        from flows.preflight_prefect import look_at_prefect

        return [*await look(Connection.from_environment(), wish), *await look_at_prefect(pool)]

    found = asyncio.run(everything())
    print("\n".join(map(str, found)))
    if any_wrong(found):
        sys.exit(1)
