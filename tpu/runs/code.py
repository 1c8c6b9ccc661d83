"""The program's source as a bundle: an archive named by the hash of its content.

Equal trees give equal bytes, whoever packs them and when, so a host that has a bundle needs no second copy and
the report can say exactly what ran.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpu.checkpoint import files

MAX_BUNDLE_BYTES = 100 * 2**20
# Before it is packed.
MAX_TREE_BYTES = 500 * 2**20
MOST_LINKS = 40
# What a training program of a host needs of this project; the rest never leaves the controller.
RELAY_PARTS = ("runtime", "checkpoint", "train")


class CodeError(ValueError):
    """The source cannot be had or is too large; the message says what to do."""


@dataclass(frozen=True)
class Bundle:
    """A .tar.gz; `sha256` is that of its content, `source` says where it came from."""

    data: bytes
    sha256: str
    source: str


def short_source(source: str) -> str:
    """A source for a line of a log or a table: a local repository by its name alone, a commit by its first letters."""
    found = re.fullmatch(r"(.+)@([0-9a-f]{12})[0-9a-f]{28}", source)
    if found is None:
        return source
    where = found[1] if "://" in found[1] else found[1].rstrip("/").rpartition("/")[2]
    return f"{where}@{found[2]}…"


def pack(entries: Iterable[tuple[str, bytes, bool]], source: str) -> Bundle:
    """Archive (path, content, executable) triples, the same bytes for the same content.

    Raises:
        CodeError: the archive is larger than MAX_BUNDLE_BYTES.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content, executable in sorted(entries):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            entry.mode = 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    sha256 = hashlib.sha256(raw.getbuffer()).hexdigest()
    data = gzip.compress(raw.getbuffer(), compresslevel=6, mtime=0)
    if len(data) > MAX_BUNDLE_BYTES:
        raise CodeError(
            f"{source} packs to {len(data) / 2**20:.0f} MiB, more than {MAX_BUNDLE_BYTES // 2**20}: "
            "put data in the bucket, or list it in .gitignore"
        )
    return Bundle(data, sha256, source)


def relay_bundle() -> Bundle:
    """The part of this project that runs on a TPU VM, from wherever it is installed."""
    package = Path(__file__).parent.parent
    paths = [package / "__init__.py"]
    for part in RELAY_PARTS:
        paths += sorted((package / part).rglob("*.py"))
    return pack(
        ((f"tpu/{path.relative_to(package)}", path.read_bytes(), False) for path in paths), "tpu-relay"
    )


def working_tree(folder: Path) -> Bundle:
    """What git tracks in `folder`, or would track: ignored files stay behind. Without git, every file but hidden ones.

    Raises:
        CodeError: see pack.
    """
    listed = subprocess.run(
        ["git", "-C", folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
    else:
        names = [
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if not any(
                part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts
            )
        ]
    paths = [(name, folder / name) for name in dict.fromkeys(names) if (folder / name).is_file()]
    _check_size(folder, paths)
    return pack(
        ((name, path.read_bytes(), path.stat().st_mode & 0o100 != 0) for name, path in paths),
        f"working tree {folder.name}",
    )


def _check_size(folder: Path, paths: list[tuple[str, Path]]) -> None:
    """Refuse what is far too large before a byte of it is read, and name where it lies."""
    sizes: Counter[str] = Counter()
    for name, path in paths:
        sizes[name.split("/")[0]] += path.stat().st_size
    if sizes.total() > MAX_TREE_BYTES:
        largest, size = sizes.most_common(1)[0]
        raise CodeError(
            f"working tree {folder.name} has {sizes.total() / 2**20:.0f} MiB, more than {MAX_TREE_BYTES // 2**20}; "
            f"{largest} alone has {size / 2**20:.0f}: put data in the bucket, or list it in .gitignore"
        )


def git_commit(repository: str, commit: str, cache: Path) -> Bundle:
    """The tree of a commit of a repository, by URL or path.

    Raises:
        CodeError: the repository cannot be reached or has no such commit.
    """
    clone = cache / hashlib.sha256(repository.encode()).hexdigest()[:16]
    if not clone.exists():
        _clone(repository, clone)
    resolve = ["-C", str(clone), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise CodeError(f"{commit} may be the name of a branch, which moves: fetch first")
        full = _git(resolve, "")
    except CodeError:
        refs = ["+refs/heads/*:refs/heads/*", "--tags", "--force"]
        _git(["-C", str(clone), "fetch", "--quiet", "origin", *refs], f"cannot fetch from {repository}")
        full = _git(resolve, f"{repository} has no commit {commit}; push it first")
    commit_id = full.decode().strip()
    tar = _git(["-C", str(clone), "archive", commit_id], f"cannot read {commit_id}")
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return pack(_tree_entries(archive), f"{repository}@{commit_id}")


def _clone(repository: str, clone: Path) -> None:
    """Beside its place and renamed, so that an interrupted clone is never taken for a whole one."""
    clone.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=clone.parent, prefix=".clone-") as folder:
        _git(["clone", "--quiet", "--bare", "--", repository, f"{folder}/it"], f"cannot clone {repository}")
        with contextlib.suppress(OSError):  # another process was quicker
            os.rename(f"{folder}/it", clone)


def _tree_entries(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes, bool]]:
    """Files of a commit; as in a working tree, a link to a file is that file, and other links stay behind."""
    members = {entry.name: entry for entry in archive}
    for entry in members.values():
        target = entry
        for _ in range(MOST_LINKS):
            if not target.issym():
                break
            place = os.path.normpath(f"{os.path.dirname(target.name)}/{target.linkname}").lstrip("/")
            target = members.get(place, archive.tarinfo())
        content = archive.extractfile(target) if target.name in members and target.isfile() else None
        if content is not None:
            yield entry.name, content.read(), target.mode & 0o100 != 0


def resolve_code(code: str, folder: Path, cache: Path) -> Bundle:
    """Get the source that `code` of a configuration names.

    Raises:
        CodeError: it cannot be had.
    """
    if code == "working-tree":
        return working_tree(folder)
    if code.startswith("gs://"):
        try:
            data = files.read(code)
        except FileNotFoundError:
            raise CodeError(f"there is no bundle {code}") from None
        try:
            content = gzip.decompress(data)
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                names = archive.getnames()
        except (OSError, EOFError, zlib.error, tarfile.TarError):
            raise CodeError(f"{code} is not a .tar.gz") from None
        if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
            raise CodeError(f"{code}: {outside[0]} would lie outside the program's folder")
        return Bundle(data, hashlib.sha256(content).hexdigest(), code)
    repository, at, commit = code.rpartition("@")
    if not at or not commit or not repository:
        raise CodeError(
            f"code: write working-tree, REPOSITORY@COMMIT or gs://…/bundle.tar.gz; found {code!r}"
        )
    return git_commit(repository, commit, cache)


def _git(arguments: list[str], message: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CodeError(f"{message}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
