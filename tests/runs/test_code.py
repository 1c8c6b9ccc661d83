import gzip
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.runs.conftest import Track
from tpu.checkpoint import files
from tpu.runs import code
from tpu.runs.code import (
    Bundle,
    CodeError,
    git_commit,
    pack,
    relay_bundle,
    resolve_code,
    short_source,
    working_tree,
)
from tpu.runs.config import parse_run_config
from tpu.runs.launch import requirements_text


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src/train.py").write_text("print(1)\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitignore").write_text("data/\n")
    (folder / "data").mkdir()
    (folder / "data/big").write_text("x" * 1000)
    (folder / "latest.py").symlink_to("src/train.py")
    return folder


@pytest.fixture
def repository(tree: Path) -> Path:
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "first")
    return tree


def unpacked(bundle: Bundle, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(bundle.data), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def names(bundle: Bundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle.data), mode="r:gz") as archive:
        return archive.getnames()


def test_equal_trees_give_equal_bytes_whoever_packs_them(repository: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    for path in copy.rglob("*.py"):
        path.touch()
    (copy / "run.sh").chmod(0o775)
    assert working_tree(copy).data == working_tree(repository).data
    (copy / "src/train.py").write_text("print(2)\n")
    assert working_tree(copy).sha256 != working_tree(repository).sha256


def test_the_working_tree_is_what_git_would_track(repository: Path, tmp_path: Path):
    (repository / "new.py").write_text("not added yet")
    (repository / "src/train.py").unlink()
    (repository / "src/other.py").write_text("")
    assert names(working_tree(repository)) == [".gitignore", "new.py", "run.sh", "src/other.py"]


def test_a_program_stays_executable_and_a_link_becomes_its_content(repository: Path, tmp_path: Path):
    there = unpacked(working_tree(repository), tmp_path / "there")
    assert (there / "run.sh").stat().st_mode & 0o111
    assert not (there / "src/train.py").stat().st_mode & 0o111
    assert (there / "latest.py").read_text() == "print(1)\n"


def test_a_commit_gives_the_bytes_of_its_tree(repository: Path, tmp_path: Path):
    first = git(repository, "rev-parse", "HEAD")
    tree = working_tree(repository)
    bundle = git_commit(str(repository), first[:10], tmp_path / "cache")
    assert bundle.data == tree.data
    assert bundle.source == f"{repository}@{first}"
    # A commit that came later is fetched into the clone that is there.
    (repository / "src/train.py").write_text("print(2)\n")
    git(repository, "commit", "-q", "-a", "-m", "second")
    second = git_commit(str(repository), git(repository, "rev-parse", "HEAD"), tmp_path / "cache")
    assert second.sha256 == working_tree(repository).sha256 != bundle.sha256
    by_branch = git_commit(str(repository), "main", tmp_path / "cache")
    assert by_branch.sha256 == second.sha256
    (repository / "src/train.py").write_text("print(3)\n")
    git(repository, "commit", "-q", "-a", "-m", "third")
    assert git_commit(str(repository), "main", tmp_path / "cache").sha256 == working_tree(repository).sha256


@pytest.mark.parametrize("commit", ["0" * 40, "no-such-branch", "--help"])
def test_a_bad_commit_is_refused_with_a_sentence(repository: Path, tmp_path: Path, commit: str):
    with pytest.raises(CodeError, match=f"has no commit {commit}; push it first"):
        git_commit(str(repository), commit, tmp_path / "cache")


def test_a_repository_that_is_not_there(tmp_path: Path):
    with pytest.raises(CodeError, match=r"cannot clone .*nowhere"):
        git_commit(str(tmp_path / "nowhere"), "main", tmp_path / "cache")
    # Nothing half-made stays behind that the next try would take for a clone.
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_git_everything_but_hidden_files_goes(tree: Path):
    (tree / ".secret").write_text("")
    (tree / "src/__pycache__").mkdir()
    (tree / "src/__pycache__/x.pyc").write_text("")
    assert names(working_tree(tree)) == ["data/big", "latest.py", "run.sh", "src/train.py"]


def test_a_bundle_that_is_too_large_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code, "MAX_BUNDLE_BYTES", 100)
    with pytest.raises(CodeError, match=r"working tree project packs to .* MiB.*\.gitignore"):
        working_tree(tree)


def test_a_huge_tree_is_refused_before_it_is_read(repository: Path):
    (repository / "env/lib").mkdir(parents=True)
    with (repository / "env/lib/big.so").open("wb") as file:
        file.truncate(50 * 2**30)
    with pytest.raises(CodeError, match=r"has 51200 MiB, more than 500; env alone has 51200: .*\.gitignore"):
        working_tree(repository)


def test_the_order_of_entries_does_not_matter():
    one, two = ("a", b"1", False), ("b", b"2", True)
    assert pack([one, two], "x").data == pack([two, one], "y").data


def test_a_host_gets_what_it_needs_of_this_project_and_nothing_else():
    found = names(relay_bundle())
    assert {"tpu/__init__.py", "tpu/runtime/segment.py", "tpu/train/jax_trainer.py"} <= set(found)
    assert not [name for name in found if name.split("/")[1] in ("cloud", "hosts", "emulator", "runs")]


def test_a_bundle_from_the_bucket(track: Track, tree: Path):
    bundle = working_tree(tree)
    url = f"{track.bucket}/bundles/mine.tar.gz"
    files.write(url, bundle.data)
    taken = resolve_code(url, tree, tree)
    assert (taken.sha256, taken.source) == (bundle.sha256, url)
    files.write(url, b"no archive")
    with pytest.raises(CodeError, match=r"is not a \.tar\.gz"):
        resolve_code(url, tree, tree)
    files.write(url, gzip.compress(b"content")[:-6])
    with pytest.raises(CodeError, match=r"is not a \.tar\.gz"):
        resolve_code(url, tree, tree)
    files.write(url, gzip.compress(b"content" * 1000))
    with pytest.raises(CodeError, match=r"is not a \.tar\.gz"):
        resolve_code(url, tree, tree)
    with pytest.raises(CodeError, match="there is no bundle"):
        resolve_code(f"{url}.none", tree, tree)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil"])
def test_a_bundle_that_reaches_out_of_its_folder_is_refused(track: Track, tmp_path: Path, name: str):
    url = f"{track.bucket}/bundles/evil.tar.gz"
    files.write(url, pack([("train.py", b"", False), (name, b"", False)], "evil").data)
    with pytest.raises(CodeError, match="would lie outside the program's folder"):
        resolve_code(url, tmp_path, tmp_path)


def test_requirements_of_a_bundle_that_was_packed_by_tar(tmp_path: Path):
    run = parse_run_config(
        {"name": "dots", "command": "true", "environment": {"requirements": "requirements.txt"}}
    )
    assert requirements_text(run, pack([("./requirements.txt", b"numpy\n", False)], "")) == "numpy\n"
    with pytest.raises(CodeError, match="not text"):
        requirements_text(run, pack([("requirements.txt", b"\xff", False)], ""))


@pytest.mark.parametrize("word", ["tree", "https://example.org/x", "@abc", "repository@"])
def test_a_source_that_means_nothing(word: str, tmp_path: Path):
    with pytest.raises(CodeError, match="write working-tree, REPOSITORY@COMMIT or gs://"):
        resolve_code(word, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (f"/home/me/project@{'ab' * 20}", "project@abababababab…"),
        (f"https://github.com/me/project@{'ab' * 20}", "https://github.com/me/project@abababababab…"),
        ("working tree project", "working tree project"),
        ("gs://b/code.tar.gz", "gs://b/code.tar.gz"),
    ],
)
def test_a_source_in_a_log_is_short(source: str, told: str):
    assert short_source(source) == told
