"""Whether a project is ready for runs: a line for each condition, which says what is wrong and how to mend it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu.checkpoint import files, objects
from tpu.checkpoint.retry import RetryPolicy, StorageUnavailable
from tpu.cloud import CloudError, TpuCloud
from tpu.cloud.calls import CallPolicy
from tpu.cloud.google import open_cloud
from tpu.connection import Connection
from tpu.hosts.identity import IdentityError, ensure_identity
from tpu.slices.candidate import Candidate
from tpu.slices.preflight import Traffic, settings_problems
from tpu.slices.provision import check_offered
from tpu.slices.regions import bucket_home
from tpu.slices.request import SliceRequest

# Nobody waits minutes to hear that nothing answers.
PATIENCE = RetryPolicy(deadline_s=5.0)


@dataclass(frozen=True)
class Finding:
    """One condition: what was looked at, whether it holds, and what was found or is to be done."""

    what: str
    holds: bool
    text: str


async def look(connection: Connection, wanted: Sequence[tuple[Candidate, SliceRequest]]) -> list[Finding]:
    """Look at everything; what one condition lacks does not hide the others."""
    found = [_identity(connection.home), await asyncio.to_thread(_bucket, connection.bucket)]
    found += await asyncio.to_thread(_settings, connection, wanted, found[-1].holds)
    try:
        async with open_cloud(connection, policy=CallPolicy(try_s=3.0, total_s=5.0)) as cloud:
            zones = {zone: await _zone(cloud, zone) for zone in dict.fromkeys(c.zone for c, _ in wanted)}
            found += zones.values()
            # A zone that does not answer would say nothing else of what it offers.
            found += [await _offer(cloud, one, request) for one, request in wanted if zones[one.zone].holds]
    except CloudError as error:  # no credentials
        found.append(Finding("credentials", False, str(error)))
    return found


def _identity(home: Path) -> Finding:
    try:
        ensure_identity(home)
    except (IdentityError, OSError) as error:
        return Finding("SSH key", False, str(error))
    return Finding("SSH key", True, f"in {home}")


def _bucket(bucket: str) -> Finding:
    """List, write, change by precondition, read, delete: all that a run does in its bucket."""
    url = f"{bucket}/preflight/{uuid.uuid4().hex}.json"
    try:
        objects.check_bucket(bucket, PATIENCE)
        objects.compare_and_set(url, b"{}", objects.create_exclusive(url, b"[]"))
        objects.read(url)
        files.remove([url], PATIENCE)
    except (objects.BucketUnusable, StorageUnavailable) as error:
        return Finding("bucket", False, str(error))
    except Exception as error:  # a right that is missing comes as an error of whichever client asked
        hint = "give yourself and the VMs' service account Storage Object Admin on it"
        return Finding(
            "bucket", False, f"{bucket} cannot be written, changed and deleted in ({error}): {hint}"
        )
    return Finding("bucket", True, f"{bucket}: objects can be listed, written, changed, read and deleted")


def _settings(
    connection: Connection, wanted: Sequence[tuple[Candidate, SliceRequest]], ask_where: bool
) -> list[Finding]:
    """Region of the bucket, grant and way to the hosts."""
    location = objects.bucket_location(connection.bucket) if ask_where else None
    home = bucket_home(*location) if location else None
    found = []
    for candidate, request in wanted:
        problems = settings_problems([candidate], request, connection, home, (), Traffic(None, 0))
        found += [Finding(f"settings for {candidate}", False, text) for _, text in problems]
    if not found:
        where = f"bucket in {home.name.lower()}" if home else "where the bucket is was not to be learned"
        found.append(
            Finding("settings", True, f"{where}; hosts are reached by the route {connection.ssh_route}")
        )
    return found


async def _zone(cloud: TpuCloud, zone: str) -> Finding:
    """The API, the credentials and the right to see nodes."""
    try:
        nodes = await cloud.list_nodes(zone)
    except CloudError as error:
        return Finding(f"Cloud TPU API in {zone}", False, _with_api_hint(str(error)))
    return Finding(f"Cloud TPU API in {zone}", True, f"answers; {len(nodes)} node(s) there now")


def _with_api_hint(text: str) -> str:
    off = "has not been used in project" in text or "is disabled" in text
    return f"{text} (turn it on: gcloud services enable tpu.googleapis.com)" if off else text


async def _offer(cloud: TpuCloud, candidate: Candidate, request: SliceRequest) -> Finding:
    try:
        await check_offered(cloud, request)
    except CloudError as error:
        return Finding(str(candidate), False, str(error))
    return Finding(str(candidate), True, f"offered, with image {request.image}")


def lines(findings: Sequence[Finding], mark: Callable[[bool], str]) -> list[str]:
    """A line a finding, and last what cannot be known beforehand."""
    told = [f"{mark(one.holds)} {one.what}: {one.text}" for one in findings]
    return [*told, "- quota: no API tells it; a creation does, and its refusal names the quota to ask for"]
