"""What the bits of a built-in training depend on besides what the segment contract records for every program."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from tpu.runtime.fingerprint import fingerprint

_COMPILERS = ("jax", "jaxlib")


def compile_facts(num_processes: int) -> Mapping[str, str]:
    """What a compiled program depends on, as far as it is known before JAX is imported."""
    versions = {name: version(name) for name in _COMPILERS}
    return fingerprint(num_processes, {}, {"python": platform.python_version(), **versions})


def training_facts() -> Mapping[str, str]:
    """Python, devices and their order, and the options of JAX that change numbers. Starts JAX's backend."""
    import jax

    from tpu.train.mesh import slice_mesh

    mesh = slice_mesh()
    axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    options = {
        name: str(getattr(jax.config, f"jax_{name}"))
        for name in ("enable_x64", "default_matmul_precision", "default_prng_impl", "threefry_partitionable")
    }
    return {
        "python": platform.python_version(),
        "processes x devices": f"{jax.process_count()} x {jax.local_device_count()}",
        "training mesh": f"{axes} of devices {','.join(str(device.id) for device in mesh.devices.flat)}",
        "jax options": ", ".join(f"{name}={value}" for name, value in options.items()),
    }
