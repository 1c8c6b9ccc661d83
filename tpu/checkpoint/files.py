"""Whole files in the bucket, and gcsfs opened the one right way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tpu.checkpoint import objects
from tpu.checkpoint.paths import checkpoint_of, checkpoints_url
from tpu.checkpoint.retry import DEFAULT_RETRY, RetryPolicy, retrying

if TYPE_CHECKING:
    from gcsfs import GCSFileSystem


def filesystem() -> GCSFileSystem:
    """gcsfs against Google's storage, or the local server of STORAGE_EMULATOR_HOST.

    Listings are never cached: other hosts write what this one looks for.
    """
    # Read when gcsfs is imported; otherwise it probes another API over TLS, which stalls against a local
    # server.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs

    options: dict[str, Any] = {"use_listings_cache": False, "cache_timeout": 0}
    local = os.environ.get("STORAGE_EMULATOR_HOST")
    if local:
        options |= {"endpoint_url": local, "token": "anon"}
    return gcsfs.GCSFileSystem(**options)


def write(url: str, data: bytes, policy: RetryPolicy = DEFAULT_RETRY) -> None:
    """Write one object whole; it is there with all its bytes or not at all.

    Raises:
        StorageUnavailable: the bucket did not take it within the policy's deadline.
        OSError: it is forbidden.
    """
    retrying(f"writing {url}", lambda: filesystem().pipe_file(url, data), policy)


def read(url: str) -> bytes:
    """All bytes of one object.

    Raises:
        FileNotFoundError: there is none.
        StorageUnavailable: the bucket did not answer within the usual deadline.
    """
    return objects.download(url)


def read_unchecked(url: str) -> bytes:
    """As `read`, for callers that compare a checksum of their own and want to see damaged bytes too."""
    return objects.download(url, checked=False)


def names(folder_url: str) -> list[str]:
    """gs:// URLs of all objects under a folder, sorted; empty when there is no such folder."""
    return objects.listing(folder_url)


def remove(urls: list[str], policy: RetryPolicy = DEFAULT_RETRY) -> None:
    """Delete objects; those that are gone already are no error."""
    for url in urls:
        try:
            retrying(f"deleting {url}", lambda url=url: filesystem().rm_file(url), policy)
        except FileNotFoundError:
            continue


def stored_checkpoints(run_dir: str) -> dict[tuple[int, int], list[str]]:
    """URLs of the objects of every checkpoint in the bucket, whole or not, by (step, attempt)."""
    found: dict[tuple[int, int], list[str]] = {}
    for url in names(checkpoints_url(run_dir)):
        key = checkpoint_of(url)
        if key is not None:
            found.setdefault(key, []).append(url)
    return found
