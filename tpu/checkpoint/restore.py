"""Reading a checkpoint back: the newest one that the fence names and whose bytes are what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tpu.checkpoint import files
from tpu.checkpoint.checksum import crc32c
from tpu.checkpoint.fence import Commit, Fence
from tpu.checkpoint.manifest import MANIFEST, FileEntry, Manifest, manifest_from_json
from tpu.checkpoint.paths import checked_run_dir, checkpoint_url
from tpu.checkpoint.shards import assemble, decode, missing_elements

_READERS = 8


class Damaged(Exception):
    """A committed checkpoint's bytes are not what was written; the message says which and how."""


@dataclass(frozen=True)
class Skipped:
    """A newer commit that could not be used, and why."""

    step: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint as whole arrays in host memory."""

    step: int
    attempt: int
    arrays: Mapping[str, np.ndarray]
    manifest: Manifest
    skipped: tuple[Skipped, ...] = ()


def restore(run_dir: str, fence: Fence) -> Restored | None:
    """The newest commit of `fence` by (step, attempt) whose bytes verify; None if there is none.

    Every byte is checked: each file against the manifest, the manifest against the fence. All processes read
    all files, so all come to the same answer.

    Raises:
        StorageUnavailable: the bucket does not answer; that is no damage, so nothing older is taken for it.
    """
    restored, skipped = newest_verified(run_dir, fence)
    if restored is None:
        return None
    return Restored(restored.step, restored.attempt, restored.arrays, restored.manifest, skipped)


def newest_verified(run_dir: str, fence: Fence) -> tuple[Restored | None, tuple[Skipped, ...]]:
    """As `restore`, with what was skipped also when nothing was left."""
    skipped: list[Skipped] = []
    for commit in sorted(fence.commits, reverse=True):
        try:
            return read_commit(run_dir, commit), tuple(skipped)
        except Damaged as error:
            skipped.append(Skipped(commit.step, commit.attempt, str(error)))
    return None, tuple(skipped)


def read_commit(run_dir: str, commit: Commit) -> Restored:
    """One commit as whole arrays.

    Raises:
        Damaged: its bytes are not what was committed.
        StorageUnavailable: the bucket does not answer.
    """
    manifest, contents = read_verified(run_dir, commit)
    try:
        decoded = {name: decode(data) for name, data in contents.items() if name.endswith(".safetensors")}
        gap = missing_elements(manifest.arrays, manifest.pieces)
        if gap:
            raise Damaged(gap)
        arrays = assemble(manifest.arrays, ((p, decoded[p.file][p.key]) for p in manifest.pieces))
    except (ValueError, KeyError) as error:
        raise Damaged(f"files and manifest do not fit together: {error!r}") from error
    return Restored(commit.step, commit.attempt, arrays, manifest)


def read_verified(run_dir: str, commit: Commit) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest and content of all files of a commit, each checked. Raises as `read_commit`."""
    folder = checkpoint_url(checked_run_dir(run_dir), commit.step, commit.attempt)
    manifest = read_manifest(run_dir, commit)
    with ThreadPoolExecutor(_READERS) as readers:
        contents = dict(readers.map(lambda entry: (entry.name, _read_entry(folder, entry)), manifest.files))
    return manifest, contents


def read_manifest(run_dir: str, commit: Commit) -> Manifest:
    """The manifest of a commit, checked against the fence. Raises as `read_commit`."""
    folder = checkpoint_url(checked_run_dir(run_dir), commit.step, commit.attempt)
    data = _checked(
        f"{folder}/{MANIFEST}", lambda data: _wrong_sum(data, commit.manifest_crc32c, "the fence")
    )
    try:
        return manifest_from_json(data)
    except ValueError as error:
        raise Damaged(str(error)) from error


def _read_entry(folder: str, entry: FileEntry) -> bytes:
    def wrong(data: bytes) -> str | None:
        if len(data) != entry.size:
            return f"has {len(data)} bytes, the manifest wants {entry.size}"
        return _wrong_sum(data, entry.crc32c, "the manifest")

    return _checked(f"{folder}/{entry.name}", wrong)


def _wrong_sum(data: bytes, wanted: str, wanting: str) -> str | None:
    found = crc32c(data)
    return None if found == wanted else f"has crc32c {found}, {wanting} wants {wanted}"


def _checked(url: str, wrong: Callable[[bytes], str | None]) -> bytes:
    """Content of an object in which `wrong` finds nothing. Read twice before it is called damaged: a byte can
    flip on its way as well as at rest."""
    name = url.rpartition("/")[2]
    try:
        data = files.read_unchecked(url)
        complaint = wrong(data)
        if complaint is not None:
            data = files.read_unchecked(url)
            complaint = wrong(data)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is gone") from error
    if complaint is not None:
        raise Damaged(f"{name} {complaint}")
    return data
