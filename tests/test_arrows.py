"""The arrows that import-linter cannot draw: it knows packages of others only by their first name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Programs of users' own, which import what they like.
EXAMPLES = ROOT / "deployments/examples"
SOURCES = [
    path
    for folder in ("flows", "tasks", "tpu", "deployments")
    for path in (ROOT / folder).rglob("*.py")
    if EXAMPLES not in path.parents
]


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def users_of(prefix: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name.startswith(prefix) for name in imported(path))
    }


@pytest.mark.parametrize(
    ("prefix", "allowed"),
    [
        ("google.cloud.tpu", ("tpu/cloud/", "tpu/emulator/")),
        ("google.cloud.storage", ("tpu/checkpoint/objects.py",)),
        ("gcsfs", ("tpu/checkpoint/files.py",)),
        ("asyncssh", ("tpu/hosts/", "tpu/emulator/")),
        # So that a successor of torch_xla needs one module again.
        ("torch_xla", ("tpu/train/xla_device.py", "deployments/bench/xla_loops.py")),
        ("jax", ("tpu/train/", "tpu/checkpoint/", "tpu/runtime/", "deployments/bench/elastic/exact.py")),
    ],
)
def test_a_client_is_imported_in_its_place_only(prefix: str, allowed: tuple[str, ...]):
    users = users_of(prefix)
    assert users, f"nobody imports {prefix}: is the test still right?"
    assert [path for path in sorted(users) if not path.startswith(allowed)] == []


def test_the_supervisor_is_one_file_of_the_standard_library():
    import sys

    ours = {name.split(".")[0] for name in imported(ROOT / "tpu/runtime/supervisor.py")}
    assert ours <= set(sys.stdlib_module_names)
