"""Bring a program's source and its environment to every host of a slice; what a host has by hash is not sent again."""

from __future__ import annotations

import asyncio
import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from tpu.hosts.group import HostGroup
from tpu.runs.code import Bundle, short_source
from tpu.runs.config import Environment

UNPACK_S = 300.0
BUILD_S = 1800.0


class SyncError(RuntimeError):
    """A host refused the code or its environment; the message holds the host's own words."""


@dataclass(frozen=True)
class Installed:
    """What a program is started with on each host: absolute paths there."""

    folder: str
    python_path: tuple[str, ...]
    python: str
    bin_folder: str


async def sync_code(
    group: HostGroup,
    bundles: Sequence[Bundle],
    environment: Environment,
    requirements: str | None,
    host_python: str | None,
    report: Callable[[str], None],
    framework: Literal["jax", "xla"] = "jax",
) -> Installed:
    """Install `bundles` (the program's first) and an environment on all hosts.

    `requirements` is the text of the program's requirements file, None for a built-in trainer; with `host_python`
    and no requirements nothing is built.

    Raises:
        SyncError: a host failed.
    """
    names = [f"{bundle.sha256[:20]}" for bundle in bundles]
    listed = await _everywhere(group, "mkdir -p ~/.relay/code && cd ~/.relay/code && pwd && ls", UNPACK_S)
    root = listed[0].splitlines()[0]
    missing = [
        (name, bundle)
        for name, bundle in zip(names, bundles, strict=True)
        if not all(name in text.splitlines() for text in listed)
    ]
    for _, bundle in missing:
        report(
            f"sync: {short_source(bundle.source)} ({len(bundle.data) / 1024:.0f} KiB) to {len(listed)} host(s)"
        )
    await asyncio.gather(*(_unpack(group, name, bundle) for name, bundle in dict(missing).items()))
    folders = [f"{root}/{name}" for name in names]
    if host_python and requirements is None:
        python = host_python
    else:
        python = await _build_environment(
            group, environment, requirements or own_requirements(framework), folders[0], report
        )
    return Installed(folders[0], tuple(folders), python, python.rpartition("/")[0])


async def _unpack(group: HostGroup, name: str, bundle: Bundle) -> None:
    # Unpacked beside its place and renamed, so that a broken transfer never looks whole.
    part = f"~/.relay/code/{name}.part.$$"
    await _everywhere(
        group,
        f"mkdir -p {part} && tar -xzf - -C {part} && (mv -T {part} ~/.relay/code/{name} || rm -rf {part})",
        UNPACK_S,
        bundle.data,
    )


async def _build_environment(
    group: HostGroup, environment: Environment, requirements: str, folder: str, report: Callable[[str], None]
) -> str:
    """Build a virtual environment with uv, once a hash and host; returns its interpreter."""
    key = hashlib.sha256(f"{environment.python}\n{requirements}".encode()).hexdigest()[:20]
    report(f"sync: environment {key}, Python {environment.python}")
    # A finished environment carries a mark; a half-built one is built anew, by one run of the host at a time. Relative
    # paths in the file are the code's.
    script = f"""set -e
cd {shlex.quote(folder)}
env_folder=$HOME/.relay/envs/{key}
mkdir -p "$HOME/.relay/envs"
exec 9>"$env_folder.lock"
flock 9
if [ ! -e "$env_folder/.complete" ]; then
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv >/dev/null || python3 -m pip install --user --quiet uv
  rm -rf "$env_folder"
  uv venv --quiet --python {environment.python} "$env_folder"
  cat > "$env_folder/requirements.txt"
  sed -i 's|^\\(-e \\)\\?\\./|\\1{folder}/|' "$env_folder/requirements.txt"
  uv pip install --quiet --python "$env_folder/bin/python" --requirement "$env_folder/requirements.txt"
  touch "$env_folder/.complete"
fi
echo "$env_folder/bin/python"
"""
    printed = await _everywhere(group, script, BUILD_S, requirements.encode())
    return printed[0].splitlines()[-1]


def own_requirements(framework: Literal["jax", "xla"]) -> str:
    """Packages of a built-in trainer, as this installation pins them, for TPUs.

    PyTorch/XLA is pinned by the extra `xla`: it need not be installed here. Raises SyncError if that is not known.
    """
    shared = ("safetensors", "numpy", "pydantic", "gcsfs", "google-cloud-storage", "google-crc32c")
    if framework == "jax":
        own = [f"jax[tpu]=={metadata.version('jax')}"]
        shared = ("optax", "equinox", *shared)
    else:
        extra = [line.partition(";") for line in metadata.requires("tpu-relay") or []]
        own = [
            name.strip().replace("torch-xla==", "torch-xla[tpu]==")
            for name, _, marker in extra
            if "extra" in marker and "xla" in marker
        ]
        if not own:
            raise SyncError(
                "this installation of tpu-relay does not know its extra `xla`: install it again (make setup)"
            )
    return "\n".join([*own, *(f"{name}=={metadata.version(name)}" for name in shared)]) + "\n"


async def _everywhere(
    group: HostGroup, command: str, timeout_s: float, stdin: bytes | None = None
) -> list[str]:
    done = await group.run(command, stdin=stdin, timeout_s=timeout_s)
    for one in done:
        if one.exit_code != 0:
            raise SyncError(f"{one.host.name}: {one.stderr.strip() or one.stdout.strip() or 'failed'}")
    return [one.stdout for one in done]
