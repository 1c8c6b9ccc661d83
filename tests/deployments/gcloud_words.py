"""Whether the installed gcloud knows a command and its flags, by the tree that its completion is made of."""

from __future__ import annotations

import functools
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

_PROGRAM = shutil.which("gcloud")
_TREE = Path(_PROGRAM).resolve().parents[1] / "data/cli/gcloud_completions.py" if _PROGRAM else None
INSTALLED = _TREE is not None and _TREE.exists()


@functools.cache
def _tree() -> dict[str, Any]:
    assert _TREE is not None
    return runpy.run_path(str(_TREE))["STATIC_COMPLETION_CLI_TREE"]


def unknown_words(command: str) -> list[str]:
    """The words of a shell command line that gcloud does not know: subcommands and flags, not their values."""
    program, *words = shlex.split(command, comments=True)
    assert program == "gcloud", command
    node, flags = _tree(), set(_tree()["flags"])
    unknown: list[str] = []
    for word in words:
        if word == "--":  # what follows is another program's
            break
        if word.startswith("-"):
            flag = word.partition("=")[0]
            unknown += [] if flag in flags else [flag]
        elif node["commands"]:
            if word not in node["commands"]:
                return [word]
            node = node["commands"][word]
            flags |= set(node["flags"])
    return unknown if not node["commands"] else [f"{command}: no such command"]
