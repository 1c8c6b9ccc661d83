"""What the bits of a training depend on besides its configuration and seed, as plain text facts.

Recorded in every manifest; a resume where one of them differs is refused or marked mixed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu.checkpoint.manifest import Environment
from tpu.checkpoint.tree import Leaves

_LIBRARIES = ("numpy", "jax", "jaxlib", "optax", "equinox", "torch", "torch_xla")
_VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "OMP_NUM_THREADS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
)


class MixedEnvironment(Exception):
    """A checkpoint was trained where other bits come out; the message lists each difference and the way
    on."""


def fingerprint(num_processes: int, leaves: Leaves, extra: Mapping[str, str]) -> Environment:
    """The facts of this process with the state that it is going to train. `extra` are the program's own."""
    facts = {
        "processes": str(num_processes),
        "threads": str(_threads()),
        "machine": _processor(),
    }
    facts |= {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            facts[name] = str(version)
    jax = sys.modules.get("jax")
    if jax is not None:
        facts |= _devices(jax, leaves)
    return {**facts, **extra}


def _devices(jax: Any, leaves: Leaves) -> dict[str, str]:
    devices = jax.devices()
    facts = {"devices": f"{len(devices)} {devices[0].device_kind}"}
    if devices[0].platform != "cpu":
        facts["machine"] = devices[0].device_kind  # the host's own processor computes nothing of the training
    meshes = {_mesh(leaf.sharding) for leaf in leaves.values() if isinstance(leaf, jax.Array)}
    meshes.discard("")
    if meshes:
        facts["mesh"] = "; ".join(sorted(meshes))
    return facts


def _mesh(sharding: Any) -> str:
    """Axes and device order of a named mesh, such as `data=4 of devices 0,1,2,3`; empty for other
    shardings."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return ""
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{axes} of devices {','.join(str(d.id) for d in mesh.devices.flat)}"


def _threads() -> int:
    """Cores that this process may use; XLA and NumPy split their sums by it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """Architecture and a short hash of the instruction sets, which choose the vector code."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split()))
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:12]}"
