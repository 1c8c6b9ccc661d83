"""What besides configuration and seed the bits of a training depend on, as recorded in every checkpoint."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("jax", "jaxlib", "optax", "equinox", "numpy")


def libraries() -> dict[str, str]:
    """Versions of Python and the libraries that compute."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


def cpu_digest() -> str:
    """Digest of the instruction set that a compiler for this CPU may use; differs where code might."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: the best that is known there
        return f"{platform.machine()}-{platform.processor()}"
    flags = sorted({flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()[2:]})
    return f"{platform.machine()}-{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:16]}"


def host_fingerprint() -> dict[str, str | int]:
    """The part that is known before JAX is imported."""
    return {
        "threads": len(os.sched_getaffinity(0)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "cpu": cpu_digest(),
        **libraries(),
    }


def training_fingerprint() -> dict[str, str | int]:
    """All of it: host, processes, devices and their order, and options of JAX that change numbers.

    Two trainings with equal fingerprints, configurations and seeds have equal bits. Starts JAX's backend.
    """
    import jax

    from tpu.train.mesh import slice_mesh

    mesh = slice_mesh()
    order = [device.id for device in mesh.devices.flat]
    return {
        **host_fingerprint(),
        "device_kind": mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "devices": f"{jax.process_count()} x {jax.local_device_count()}",
        "mesh": ", ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        "device_order": ",".join(map(str, order)) if order != sorted(order) else "by id",
        "x64": str(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        "matmul_precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        "random": f"{jax.config.jax_default_prng_impl}, "  # type: ignore[attr-defined]
        f"partitionable={jax.config.jax_threefry_partitionable}",  # type: ignore[attr-defined]
    }
