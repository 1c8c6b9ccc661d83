"""Accelerator types of Cloud TPU: chips, hosts, shapes and the image each one boots.

v2, v3, v4 and v5p are named by cores (two a chip, so v4-8 is 4 chips on one host); v5litepod and v6e are
named by chips. Everything here is derived from one table of (name, topology) rows.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

_CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}

# v2 and v3 show each core as a device; v4 and v5p join a chip's two cores into one.
_DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 1, "v5p": 1, "v5litepod": 1, "v6e": 1}

_RUNTIME_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}

_PLANE_TORUS = {8: "2x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"}
_CUBE_TORUS = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
    2048: "8x8x16",
    4096: "8x16x16",
}
_PLANE_MESH = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}

# Per generation: the number in the name -> topology in chips.
_TOPOLOGIES: dict[str, dict[int, str]] = {
    "v2": _PLANE_TORUS,
    "v3": {**_PLANE_TORUS, 1024: "16x32", 2048: "32x32"},
    "v4": _CUBE_TORUS,
    "v5p": {**_CUBE_TORUS, 8192: "16x16x16", 12288: "16x16x24"},
    "v5litepod": _PLANE_MESH,
    "v6e": _PLANE_MESH,
}

# What people write for a generation that the API calls otherwise.
SPOKEN_GENERATIONS = {"v5e": "v5litepod", "v5lite": "v5litepod", "v6": "v6e", "trillium": "v6e"}


class UnknownAcceleratorType(ValueError):
    """The name is no accelerator type; the message offers near matches."""

    def __init__(self, name: str, near: tuple[str, ...]) -> None:
        self.name = name
        self.near = near
        offer = (
            f"did you mean {' or '.join(near)}?" if near else f"known generations: {', '.join(_TOPOLOGIES)}"
        )
        super().__init__(
            f"unknown accelerator type {name!r}: {offer} "
            "(v2, v3, v4 and v5p are named by cores, two a chip; v5litepod and v6e by chips)"
        )


@dataclass(frozen=True)
class AcceleratorType:
    """One kind of slice.

    `topology` is in chips ("2x2x2"); `host_bounds` and `chips_per_host_bounds` are written as the TPU VM's
    own environment writes them ("1,1,2"). `devices_per_chip` is what JAX counts. `runtime_version` is the
    image that a slice of this type boots when none is asked for.
    """

    name: str
    generation: str
    chips: int
    cores: int
    hosts: int
    chips_per_host: int
    topology: str
    host_bounds: str
    chips_per_host_bounds: str
    devices_per_chip: int
    runtime_version: str


def _host_shape(topology: tuple[int, int, int], chips: int) -> tuple[int, int, int]:
    """Chips of one host: a single-host slice is one host whatever its size, all others have 2x2 a host."""
    single_host = chips <= 8 and topology[2] == 1
    return topology if single_host else (2, 2, 1)


def _describe(generation: str, size: int, topology: str) -> AcceleratorType:
    sides = [int(side) for side in topology.split("x")]
    shape = (sides[0], sides[1], sides[2] if len(sides) == 3 else 1)
    chips = math.prod(shape)
    host = _host_shape(shape, chips)
    host_grid = tuple(whole // part for whole, part in zip(shape, host, strict=True))
    return AcceleratorType(
        name=f"{generation}-{size}",
        generation=generation,
        chips=chips,
        cores=chips * _CORES_PER_CHIP[generation],
        hosts=math.prod(host_grid),
        chips_per_host=math.prod(host),
        topology=topology,
        host_bounds=",".join(map(str, host_grid)),
        chips_per_host_bounds=",".join(map(str, host)),
        devices_per_chip=_DEVICES_PER_CHIP[generation],
        runtime_version=_RUNTIME_VERSIONS[generation],
    )


ACCELERATOR_TYPES: dict[str, AcceleratorType] = {
    described.name: described
    for generation, sizes in _TOPOLOGIES.items()
    for described in (_describe(generation, size, topology) for size, topology in sizes.items())
}


def accelerator_type(name: str) -> AcceleratorType:
    """Look an accelerator type up by its API name, such as "v4-16".

    Raises:
        UnknownAcceleratorType: no such type; the error's `near` holds up to three names that are close.
    """
    try:
        return ACCELERATOR_TYPES[name]
    except KeyError:
        raise UnknownAcceleratorType(name, _near_matches(name)) from None


def _near_matches(name: str) -> tuple[str, ...]:
    generation, _, size = name.strip().lower().partition("-")
    generation = SPOKEN_GENERATIONS.get(generation, generation)
    sizes = _TOPOLOGIES.get(generation)
    if sizes is None:
        return tuple(difflib.get_close_matches(f"{generation}-{size}", ACCELERATOR_TYPES, n=3, cutoff=0.7))
    if not size.isdigit():
        return tuple(f"{generation}-{known}" for known in sorted(sizes)[:3])
    wanted = int(size)
    if wanted in sizes:
        return (f"{generation}-{wanted}",)
    below = [known for known in sizes if known < wanted]
    above = [known for known in sizes if known > wanted]
    return tuple(f"{generation}-{known}" for known in (*sorted(below)[-1:], *sorted(above)[:1]))
