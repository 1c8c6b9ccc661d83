"""`relay preflight`: whether the project is ready for runs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer


def preflight(
    config: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="the run configuration whose slices are wanted")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="change a field, such as slice.zone=us-east5-a"),
    ] = None,
) -> None:
    """Look at credentials, API, bucket, settings and what the zones offer; exits 1 if something is wrong.

    Without a file the slice is v4-8 in us-central2-b; change it with --set.
    """
    from tpu.connection import Connection
    from tpu.runs.config import apply_changes, load_run_config, parse_changes, parse_run_config
    from tpu.runs.readiness import lines, look
    from tpu.slices.request import SliceRequest

    wanted = parse_changes(changes or [])
    if config is not None:
        run = load_run_config(config, wanted)
    else:
        values = {"name": "preflight", "command": ["true"]}
        apply_changes(values, wanted)
        run = parse_run_config(values)
    place = run.slice
    asked = [
        (
            choice,
            SliceRequest(
                choice.zone, choice.accelerator_type, choice.provisioning, place.runtime_version,
                external_ips=place.external_ips,
            ),
        )
        for choice in place.choices
    ]  # fmt: skip
    found = asyncio.run(look(Connection.from_environment(), asked))
    print("\n".join(lines(found, lambda holds: "ok" if holds else "WRONG")))
    if not all(one.holds for one in found):
        sys.exit(1)
