"""Exclusive creation and compare-and-set of small objects: the one module that uses google-cloud-storage.

Small objects only: preconditions hold for multipart uploads, which the library chooses below 8 MiB; and
never a conditional delete. Listing and whole downloads are here as well, since a process that restores needs
nothing else and gcsfs would add a fifth of a second to every start after a preemption. All other ways to the
bucket go through `files`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu.checkpoint.paths import split_url
from tpu.checkpoint.retry import DEFAULT_RETRY, RetryPolicy, retrying

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

LARGEST_BYTES = 4 << 20
# At least as many as threads that read and write at once.
CONNECTIONS = 64
# Seconds a request; tried again by `retrying`, which knows one deadline for all tries.
_ONCE: dict[str, Any] = {"timeout": 20, "retry": None}
_NAMES = "items(name),nextPageToken"
_ENTRIES = "items(name,generation,metadata),nextPageToken"


class ObjectExists(Exception):
    """An object that was to be created is there already; the message names it."""


class StaleGeneration(Exception):
    """An object changed since it was read; read it again and decide anew."""


class BucketUnusable(Exception):
    """There is no such bucket, or it may not be used; the message says what to do."""


@dataclass(frozen=True)
class Listed:
    """What a listing tells of an object without reading it; `labels` are those it was last written with."""

    url: str
    generation: int
    labels: Mapping[str, str]


def create_exclusive(url: str, data: bytes, labels: Mapping[str, str] | None = None) -> int:
    """Create the object at `url` and return its generation; of all who try, one succeeds.

    A listing shows `labels`, so that nobody need read an object to see whether it concerns them.

    Raises:
        ObjectExists: it is there already, with other content than a try of ours whose answer was lost.
    """
    from google.api_core.exceptions import PreconditionFailed

    try:
        return _put(url, data, 0, labels)
    except PreconditionFailed as error:
        raise ObjectExists(f"{url} exists already") from error


def compare_and_set(url: str, data: bytes, generation: int, labels: Mapping[str, str] | None = None) -> int:
    """Replace the object at `url`, and its labels, if it still has `generation`; returns the new generation.

    Raises:
        StaleGeneration: somebody else changed it.
    """
    from google.api_core.exceptions import PreconditionFailed

    try:
        return _put(url, data, generation, labels)
    except PreconditionFailed as error:
        raise StaleGeneration(f"{url} has another generation than {generation}") from error


def read(url: str) -> tuple[bytes, int] | None:
    """Content and generation of the object at `url`, of one and the same moment; None if there is none."""
    return retrying(f"reading {url}", lambda: _read(url))


def _read(url: str) -> tuple[bytes, int] | None:
    from google.api_core.exceptions import NotFound

    bucket, name = split_url(url)
    blob = _client(local_server(), os.getpid()).bucket(bucket).blob(name)
    try:
        # One request: the answer has the generation of these bytes in a header.
        return blob.download_as_bytes(**_ONCE), _generation(blob)
    except NotFound:
        return None


def download(url: str, checked: bool = True) -> bytes:
    """All bytes of the object at `url`, of any size.

    `checked` compares them with the checksum that the service keeps; callers that have a checksum of their own
    leave it out, to tell damage from trouble themselves.

    Raises:
        FileNotFoundError: there is none.
        StorageUnavailable: the bucket did not answer within the usual deadline.
    """
    from google.api_core.exceptions import NotFound

    bucket, name = split_url(url)
    blob = _client(local_server(), os.getpid()).bucket(bucket).blob(name)
    options = _ONCE if checked else {**_ONCE, "checksum": None}
    try:
        return retrying(
            f"reading {url}",
            lambda: blob.download_as_bytes(**options),
        )
    except NotFound as error:
        raise FileNotFoundError(url) from error


def listing(folder_url: str) -> list[str]:
    """gs:// URLs of all objects under a folder, sorted; empty when there is no such folder."""
    bucket, prefix = split_url(folder_url)
    # With the slash, so that the folder `1` does not take in the folder `10`.
    prefix = f"{prefix.rstrip('/')}/"
    client = _client(local_server(), os.getpid())
    found = retrying(
        f"listing {folder_url}",
        lambda: [blob.name for blob in client.list_blobs(bucket, prefix=prefix, fields=_NAMES, **_ONCE)],
    )
    return sorted(f"gs://{bucket}/{name}" for name in found)


def entries(folder_url: str) -> list[Listed]:
    """All objects under a folder with their generations and labels, of one page after the other, by name."""
    bucket, prefix = split_url(folder_url)
    prefix = f"{prefix.rstrip('/')}/"
    client = _client(local_server(), os.getpid())
    found = retrying(
        f"listing {folder_url}",
        lambda: [
            Listed(f"gs://{bucket}/{blob.name}", _generation(blob), blob.metadata or {})
            for blob in client.list_blobs(bucket, prefix=prefix, fields=_ENTRIES, **_ONCE)
        ],
    )
    return sorted(found, key=lambda listed: listed.url)


def folders(folder_url: str) -> list[str]:
    """Names of the folders right in a folder, sorted, without listing what is in them."""
    bucket, prefix = split_url(folder_url)
    prefix = f"{prefix.rstrip('/')}/"
    client = _client(local_server(), os.getpid())

    def ask() -> set[str]:
        pages = client.list_blobs(bucket, prefix=prefix, delimiter="/", fields=f"prefixes,{_NAMES}", **_ONCE)
        return {name for page in pages.pages for name in page.prefixes}

    found = retrying(f"listing {folder_url}", ask)
    return sorted(name.removeprefix(prefix).rstrip("/") for name in found)


def check_bucket(bucket_url: str, policy: RetryPolicy = DEFAULT_RETRY) -> None:
    """Find out whether a bucket can be used, before anything waits for it for long.

    Raises:
        BucketUnusable: there is no such bucket, or no right to it.
        StorageUnavailable: nothing answers.
    """
    from google.api_core.exceptions import Forbidden, NotFound, Unauthorized
    from google.auth.exceptions import DefaultCredentialsError

    name = bucket_url.removeprefix("gs://").rstrip("/")
    try:
        client = _client(local_server(), os.getpid())
        retrying(
            f"asking for {bucket_url}",
            lambda: next(client.list_blobs(name, max_results=1, fields=_NAMES, **_ONCE).pages, None),
            policy,
        )
    except NotFound as error:
        raise BucketUnusable(
            f"there is no bucket {bucket_url}: create it, or set TPU_RELAY_BUCKET"
        ) from error
    except (Forbidden, Unauthorized) as error:
        raise BucketUnusable(f"no right to list {bucket_url}: {error.message}") from error
    except DefaultCredentialsError as error:
        raise BucketUnusable(
            f"no credentials for {bucket_url}: run `gcloud auth application-default login`, or set "
            "STORAGE_EMULATOR_HOST if the bucket is the emulator's"
        ) from error


def bucket_location(bucket_url: str) -> tuple[str, tuple[str, ...]] | None:
    """Where a bucket is, as the service says it: its location, and the two of a dual-region.

    None if the right to ask is missing (storage.buckets.get), which nothing else needs.
    """
    from google.api_core.exceptions import Forbidden, Unauthorized

    name = bucket_url.removeprefix("gs://").rstrip("/")
    client = _client(local_server(), os.getpid())
    try:
        bucket = retrying(f"asking where {bucket_url} is", lambda: client.get_bucket(name, **_ONCE))
    except (Forbidden, Unauthorized):
        return None
    return (bucket.location, tuple(bucket.data_locations or ())) if bucket.location else None


def _put(url: str, data: bytes, generation: int, labels: Mapping[str, str] | None) -> int:
    from google.api_core.exceptions import PreconditionFailed

    if len(data) > LARGEST_BYTES:
        raise ValueError(f"{url}: preconditions hold up to {LARGEST_BYTES} bytes, these are {len(data)}")
    bucket, name = split_url(url)

    tries = 0

    def put() -> int:
        nonlocal tries
        tries += 1
        blob = _client(local_server(), os.getpid()).bucket(bucket).blob(name)
        if labels:
            blob.metadata = dict(labels)
        try:
            blob.upload_from_string(
                data, content_type="application/json", if_generation_match=generation, **_ONCE
            )
        except PreconditionFailed:
            # An earlier try may have been carried out, and only its answer lost: then these bytes are there.
            if tries > 1 and (found := read(url)) is not None and found[0] == data:
                return found[1]
            raise
        return _generation(blob)

    return retrying(f"writing {url}", put)


def _generation(blob: Blob) -> int:
    if blob.generation is None:
        raise RuntimeError(f"the storage service gave no generation for {blob.name}")
    return int(blob.generation)


def local_server() -> str | None:
    """Address of the storage server on this machine, if it stands in for Google's."""
    return os.environ.get("STORAGE_EMULATOR_HOST")


@functools.cache
def _client(emulator: str | None, process: int) -> Client:
    """One client a process and server: opening one anew would fetch a token for every call."""
    from google.cloud import storage
    from requests.adapters import HTTPAdapter

    client = storage.Client()
    # Opening a connection costs more than most requests, and urllib3 warns of each that it has no room to keep.
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
    return client
