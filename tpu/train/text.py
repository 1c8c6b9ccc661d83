"""The text of a byte-level language model: where it lies, its bytes, and the hash that tells when it changed.

Without JAX, since the controller hashes the text before anything is made.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
from pathlib import Path

import numpy as np

from tpu.train.settings import ByteLm


class TextNotFoundError(ValueError):
    """A source names no text."""


class DataChangedError(ValueError):
    """The text is not the one that the run started with."""


def read_text(sources: list[str]) -> bytes:
    """The bytes of all sources, one after the other; the files of a glob in the order of their names.

    A source is a local path or glob, a gs:// path or glob, or python:MODULE for the source of an installed
    module (which is read, never run). Raises TextNotFoundError for a source with nothing in it.
    """
    return b"".join(part for source in sources for part in _parts(source))


def text_sha256(sources: list[str]) -> str:
    """The hash of the text that goes into a run's configuration."""
    return hashlib.sha256(read_text(sources)).hexdigest()


def check_text(text: bytes, expected_sha256: str | None, sources: list[str]) -> None:
    """Raises DataChangedError if `text` does not have the hash that the run recorded (None: no record)."""
    found = hashlib.sha256(text).hexdigest()
    if expected_sha256 is not None and found != expected_sha256:
        raise DataChangedError(
            f"the training text {', '.join(sources)} has changed: this run started on sha256 "
            f"{expected_sha256[:16]}…, here it is {found[:16]}… ({len(text)} bytes). "
            "Bring the old text back, or start a new run (or a fork) on the new one."
        )


def split(text: bytes, settings: ByteLm) -> tuple[np.ndarray, np.ndarray]:
    """The (training, held out) parts. Raises ValueError if one is shorter than a window."""
    everything = np.frombuffer(text, np.uint8)
    cut = len(everything) - int(len(everything) * settings.held_out)
    training, held_out = everything[:cut], everything[cut:]
    if min(len(training), len(held_out)) <= settings.context:
        raise ValueError(
            f"the text has {len(everything)} bytes: after holding out {settings.held_out:g} of it, one part is "
            f"shorter than a window of {settings.context + 1} bytes. Give more text or a shorter context."
        )
    return training, held_out


def _parts(source: str) -> list[bytes]:
    if source.startswith("python:"):
        return [_module_path(source).read_bytes()]
    if source.startswith("gs://"):
        return _bucket_parts(source)
    paths = [Path(path) for path in sorted(glob.glob(source, recursive=True))]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise TextNotFoundError(f"no text at {source!r}: no such file here, and no file matches it as a glob")
    return [path.read_bytes() for path in files]


def _module_path(source: str) -> Path:
    name = source.removeprefix("python:")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise TextNotFoundError(f"no text at {source!r}: this Python has no module {name} with a source file")
    return Path(spec.origin)


def _bucket_parts(source: str) -> list[bytes]:
    from tpu.checkpoint.files import filesystem  # a client of the bucket, only for those who need one

    bucket = filesystem()
    paths = sorted(str(path) for path in bucket.glob(source)) if "*" in source else [source]
    if not paths:
        raise TextNotFoundError(f"no text at {source!r}: nothing in the bucket matches it")
    try:
        return [bytes(bucket.cat_file(path)) for path in paths]  # type: ignore[arg-type]
    except FileNotFoundError as missing:
        raise TextNotFoundError(f"no text at {source!r}: no such object in the bucket") from missing
