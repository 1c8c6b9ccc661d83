"""The manifest: what a checkpoint is made of, each part with its size and checksum.

Each host writes `host-<i>.json` (a `HostPart`) after its shards; process 0 writes `manifest.json` after all
parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu.checkpoint.shards import ArraySpec, Piece, missing_elements

FORMAT = 1
MANIFEST = "manifest.json"
Environment = Mapping[str, str]


class MalformedManifest(ValueError):
    """A manifest or host part cannot be understood; the message says what is wrong."""


class IncompleteParts(ValueError):
    """The parts of the hosts do not make up the state; the message names the first gap."""


@dataclass(frozen=True)
class FileEntry:
    """One object of the checkpoint: its name within it, size in bytes, and crc32c as hex."""

    name: str
    size: int
    crc32c: str


@dataclass(frozen=True)
class HostPart:
    """What one process wrote."""

    process: int
    files: tuple[FileEntry, ...]
    pieces: tuple[Piece, ...]
    arrays: Mapping[str, ArraySpec]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint. `environment` is what its bits depend on besides configuration and seed; `mixed`
    says that a part of the run was trained in another one."""

    step: int
    attempt: int
    processes: int
    files: tuple[FileEntry, ...]
    pieces: tuple[Piece, ...]
    arrays: Mapping[str, ArraySpec]
    environment: Environment
    mixed: bool = False
    parent: str = ""


def part_name(process: int) -> str:
    return f"host-{process}.json"


def combine(
    step: int,
    attempt: int,
    parts: Sequence[tuple[FileEntry, HostPart]],
    environment: Environment,
    mixed: bool,
) -> Manifest:
    """The manifest of all hosts' parts, each with the entry of its own file.

    Raises:
        IncompleteParts: they disagree about the arrays, or leave a gap.
    """
    arrays = parts[0][1].arrays
    for _, part in parts:
        shapes = {n: (s.dtype, s.shape) for n, s in part.arrays.items()}
        if shapes != {n: (s.dtype, s.shape) for n, s in arrays.items()}:
            raise IncompleteParts(
                f"processes 0 and {part.process} disagree about names, dtypes or shapes of the state"
            )
    pieces = tuple(piece for _, part in parts for piece in part.pieces)
    gap = missing_elements(arrays, pieces)
    if gap:
        raise IncompleteParts(f"step {step} of attempt {attempt}: {gap}")
    files = tuple(entry for own, part in parts for entry in (own, *part.files))
    return Manifest(step, attempt, len(parts), files, pieces, arrays, dict(environment), mixed)


def to_json(value: Manifest | HostPart) -> bytes:
    # `vars` in place of dataclasses.asdict: that copies every leaf, beside a training that wants the core.
    return json.dumps({"format": FORMAT, **vars(value)}, default=vars, sort_keys=True).encode()


def manifest_from_json(data: bytes) -> Manifest:
    """Raises MalformedManifest."""
    try:
        body = _body(data)
        return Manifest(**{**body, **_common(body)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedManifest(f"{MANIFEST} cannot be understood: {error!r}") from error


def part_from_json(data: bytes) -> HostPart:
    """Raises MalformedManifest."""
    try:
        body = _body(data)
        return HostPart(**{**body, **_common(body)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedManifest(f"a host's part cannot be understood: {error!r}") from error


def environment_difference(before: Environment, now: Environment) -> list[str]:
    """One line for each fact that differs, such as `threads: 1 → 2`; empty if all are the same."""
    return [
        f"{name}: {before.get(name, '(not set)')} → {now.get(name, '(not set)')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _body(data: bytes) -> dict[str, Any]:
    body = json.loads(data)
    if body.pop("format") != FORMAT:
        raise MalformedManifest(f"it has another format than {FORMAT}: written by another version?")
    return body


def _common(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "files": tuple(FileEntry(**f) for f in body["files"]),
        "pieces": tuple(
            Piece(p["name"], p["key"], tuple(p["start"]), tuple(p["shape"]), p["file"])
            for p in body["pieces"]
        ),
        "arrays": {
            n: ArraySpec(s["dtype"], tuple(s["shape"]), s["sharding"]) for n, s in body["arrays"].items()
        },
    }
