"""Compiled programs kept in the bucket, so that a fresh host compiles nothing.

JAX keeps its cache in a local folder (its own access to gs:// hung against a local server). Around it:

    <folder>/<key>/complete/     whole entries only, each put there by a rename
    <folder>/<key>/<owner>/      where JAX writes for one attempt; a kill in the middle of a write stays in there
    <bucket>/caches/jax/<key>/   the complete entries, for other hosts (caches/xla for PyTorch/XLA)

JAX names an entry by everything that it depends on, so a wrong key costs a compilation, never a wrong program.
A cache that fails is a slow start and nothing worse: its errors are printed and training goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FETCH_DEADLINE_S = 15.0  # compiling a demo takes 5 s; a large model minutes
PUBLISH_DEADLINE_S = 5.0


def cache_key(parts: object) -> str:
    """A folder's name from whatever tells programs apart, such as settings and library versions (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class CompileCache:
    """The cache of one program for one attempt of a run. Made by `open_cache`."""

    complete: Path
    working: Path
    remote: str | None
    suffix: str = "-cache"  # of an entry's name; JAX puts other files beside its entries

    def fetch(self) -> None:
        """Bring the bucket's entries here, then lay all complete ones out for JAX."""
        if self.remote:
            _ignoring_storage("fetch compiled programs", self._fetch_remote)
        for entry in self._entries(self.complete):
            _link(entry, self.working / entry.name)

    def publish(self) -> None:
        """Keep what JAX has compiled since, here and in the bucket."""
        new = [e for e in self._entries(self.working) if not (self.complete / e.name).exists()]
        for entry in new:
            _link(entry, self.complete / entry.name)
        if self.remote and new:
            _ignoring_storage("keep compiled programs", lambda: self._put_remote([e.name for e in new]))

    def close(self) -> None:
        """Remove the attempt's own folder; what was published stays."""
        shutil.rmtree(self.working, ignore_errors=True)

    def _fetch_remote(self) -> None:
        from tpu.checkpoint import files

        for url in files.names(str(self.remote)):
            name = url.rsplit("/", 1)[1]
            if not (self.complete / name).exists():
                partial = self.working / f"{name}.partial"
                partial.write_bytes(files.read(url))
                os.replace(partial, self.complete / name)

    def _put_remote(self, names: list[str]) -> None:
        from tpu.checkpoint import files

        for name in names:
            files.write(f"{self.remote}/{name}", (self.complete / name).read_bytes())

    def _entries(self, folder: Path) -> list[Path]:
        return sorted(path for path in folder.iterdir() if path.name.endswith(self.suffix))


def open_cache(
    folder: Path, key: str, owner: str, bucket: str | None, kind: Literal["jax", "xla"] = "jax"
) -> CompileCache:
    """Make the folders of one attempt. `owner` names its run: what an earlier attempt of it left is removed.

    `bucket` is gs://NAME, or None to keep to this host.
    """
    complete, working = folder / key / "complete", folder / key / owner
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True, exist_ok=True)
    complete.mkdir(parents=True, exist_ok=True)
    remote = f"{bucket}/caches/{kind}/{key}" if bucket else None
    return CompileCache(complete, working, remote, "-cache" if kind == "jax" else "")


def use_cache(cache: CompileCache) -> None:
    """Point JAX at the cache. Entries of any size and compile time are kept."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache.working))
    # XLA's own caches would put the folder's path into the entries' names, which differs from host to host.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def every_process_writes() -> Iterator[None]:
    """Let each process keep what it compiles within the block.

    JAX has process 0 alone write, to spare a folder that all share. Ours is each process's own, and on CPU
    hosts each process's entries have names of their own: the others would compile anew at every start.
    """
    from jax._src import (
        distributed,  # no public switch; a test of two processes notices if this stops working
    )

    state = distributed.global_state
    process_id, state.process_id = state.process_id, 0
    try:
        yield
    finally:
        state.process_id = process_id


class Background:
    """One piece of work beside the main thread, waited for up to a deadline."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._name = name
        # A daemon: a cache must never keep a process from leaving its TPU.
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> None:
        """Wait until it is done, or until `deadline_s` are over; says so then."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            print(
                f"{self._name}: not done after {deadline_s:g} s, going on without",
                file=sys.stderr,
                flush=True,
            )


def _link(entry: Path, to: Path) -> None:
    try:
        os.link(entry, to)
    except FileExistsError:
        return


def _ignoring_storage(what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except (
        Exception
    ) as failure:  # whatever a bucket, a proxy or a disk can answer: all cost a compilation at most
        print(f"could not {what}: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
