"""Who asks: credentials, SSH key and clock of this machine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import google.auth
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.auth.transport.requests import Request

from tpu.clock import Clock
from tpu.cloud.project import GoogleProject, ProjectUnknown
from tpu.connection import Connection
from tpu.hosts.identity import IdentityError, ensure_identity
from tpu.readiness.finding import Finding, good, not_told, unknown, wrong

# Google refuses tokens that a clock five minutes off has signed; long before that leases and reports look odd.
MOST_SKEW_S = 60.0
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Caller:
    """Whose rights count; `member` is how IAM calls them, in a shell."""

    member: str


ANYBODY = Caller('"user:$(gcloud config get account)"')


async def credentials(connection: Connection) -> tuple[Finding, Caller | None]:
    """Whether there are any that work, and whose they are; None if nobody need ask further."""
    if connection.api_endpoint is not None:
        return good("credentials", f"the key of the API at {connection.api_endpoint}"), ANYBODY
    return await asyncio.to_thread(_google_credentials)


def _google_credentials() -> tuple[Finding, Caller | None]:
    try:
        found, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError:
        mend = "gcloud auth application-default login"
        return wrong("credentials", "there are none on this machine", mend), None
    try:
        found.refresh(Request())
    except GoogleAuthError as error:
        return wrong(
            "credentials", f"Google does not take them ({error})", "gcloud auth application-default login"
        ), None
    account = getattr(found, "service_account_email", None)
    if account:
        return good("credentials", f"of the service account {account}"), Caller(f"serviceAccount:{account}")
    return good("credentials", "a person's, of gcloud auth application-default login"), ANYBODY


def ssh_key(home: Path) -> Finding:
    try:
        ensure_identity(home)
    except (IdentityError, OSError) as error:
        return wrong("SSH key", str(error))
    return good("SSH key", f"in {home}")


async def clock(project: GoogleProject, name: str, ours: Clock) -> Finding:
    """Whether this machine's clock goes right."""
    what = "clock"
    try:
        theirs = await project.date_s()
    except ProjectUnknown as error:
        return not_told(what, error, name)
    if theirs is None:
        return unknown(what, "Google's answer has no time")
    skew_s = ours.time() - theirs
    if abs(skew_s) <= MOST_SKEW_S:
        return good(what, "goes as Google's")
    how = "ahead of" if skew_s > 0 else "behind"
    return wrong(what, f"{abs(skew_s):.0f} s {how} Google's, which refuses what such a clock has signed",
                 "sudo timedatectl set-ntp true")  # fmt: skip
