"""The accelerator table against what is documented, row by row."""

from __future__ import annotations

import math

import pytest

from tpu.topology import ACCELERATOR_TYPES, UnknownAcceleratorType, accelerator_type

# generation, size in the name, topology, chips, hosts: written out by hand from the documentation.
DOCUMENTED = [
    *[
        (generation, *row)
        for generation in ("v2", "v3")
        for row in [
            (8, "2x2", 4, 1),
            (32, "4x4", 16, 4),
            (64, "4x8", 32, 8),
            (128, "8x8", 64, 16),
            (256, "8x16", 128, 32),
            (512, "16x16", 256, 64),
        ]
    ],
    ("v3", 1024, "16x32", 512, 128),
    ("v3", 2048, "32x32", 1024, 256),
    *[
        (generation, *row)
        for generation in ("v4", "v5p")
        for row in [
            (8, "2x2x1", 4, 1),
            (16, "2x2x2", 8, 2),
            (32, "2x2x4", 16, 4),
            (64, "2x4x4", 32, 8),
            (128, "4x4x4", 64, 16),
            (256, "4x4x8", 128, 32),
            (512, "4x8x8", 256, 64),
            (1024, "8x8x8", 512, 128),
            (2048, "8x8x16", 1024, 256),
            (4096, "8x16x16", 2048, 512),
        ]
    ],
    ("v5p", 8192, "16x16x16", 4096, 1024),
    ("v5p", 12288, "16x16x24", 6144, 1536),
    *[
        (generation, *row)
        for generation in ("v5litepod", "v6e")
        for row in [
            (1, "1x1", 1, 1),
            (4, "2x2", 4, 1),
            (8, "2x4", 8, 1),
            (16, "4x4", 16, 4),
            (32, "4x8", 32, 8),
            (64, "8x8", 64, 16),
            (128, "8x16", 128, 32),
            (256, "16x16", 256, 64),
        ]
    ],
]


@pytest.mark.parametrize(("generation", "size", "topology", "chips", "hosts"), DOCUMENTED)
def test_a_documented_type(generation: str, size: int, topology: str, chips: int, hosts: int) -> None:
    found = accelerator_type(f"{generation}-{size}")
    assert (found.generation, found.topology, found.chips, found.hosts) == (
        generation,
        topology,
        chips,
        hosts,
    )
    assert found.chips_per_host * found.hosts == chips
    if generation in ("v5litepod", "v6e"):
        assert found.chips == size
        assert found.cores == chips
        assert found.chips_per_host == {1: 1, 8: 8}.get(size, 4)
    else:
        assert found.cores == size == 2 * chips
        assert found.chips_per_host == 4
    assert found.devices_per_chip == (2 if generation in ("v2", "v3") else 1)


def test_the_table_has_no_other_types() -> None:
    assert set(ACCELERATOR_TYPES) == {f"{generation}-{size}" for generation, size, *_ in DOCUMENTED}


@pytest.mark.parametrize(
    ("name", "host_bounds", "chips_per_host_bounds"),
    [
        ("v2-8", "1,1,1", "2,2,1"),
        ("v3-32", "2,2,1", "2,2,1"),
        ("v4-8", "1,1,1", "2,2,1"),
        ("v4-16", "1,1,2", "2,2,1"),
        ("v4-64", "1,2,4", "2,2,1"),
        ("v5p-12288", "8,8,24", "2,2,1"),
        ("v5litepod-1", "1,1,1", "1,1,1"),
        ("v5litepod-4", "1,1,1", "2,2,1"),
        ("v6e-8", "1,1,1", "2,4,1"),
        ("v6e-16", "2,2,1", "2,2,1"),
        ("v5litepod-32", "2,4,1", "2,2,1"),
    ],
)
def test_bounds_are_written_as_the_vm_writes_them(
    name: str, host_bounds: str, chips_per_host_bounds: str
) -> None:
    found = accelerator_type(name)
    assert (found.host_bounds, found.chips_per_host_bounds) == (host_bounds, chips_per_host_bounds)


def test_bounds_multiply_to_hosts_and_chips() -> None:
    for found in ACCELERATOR_TYPES.values():
        assert math.prod(map(int, found.host_bounds.split(","))) == found.hosts
        assert math.prod(map(int, found.chips_per_host_bounds.split(","))) == found.chips_per_host


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("v2-8", "tpu-ubuntu2204-base"),
        ("v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_the_default_image(name: str, image: str) -> None:
    assert accelerator_type(name).runtime_version == image


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v4-12", ("v4-8", "v4-16")),
        ("v4-4", ("v4-8",)),
        ("v2-4096", ("v2-512",)),
        ("v5e-8", ("v5litepod-8",)),
        ("V4-8", ("v4-8",)),
        ("v6e", ("v6e-1", "v6e-4", "v6e-8")),
        ("v5-litepod-16", ("v5litepod-16", "v5litepod-1", "v5litepod-64")),
        ("a100", ()),
    ],
)
def test_an_unknown_type_gets_near_matches(name: str, near: tuple[str, ...]) -> None:
    with pytest.raises(UnknownAcceleratorType) as caught:
        accelerator_type(name)
    assert caught.value.near == near
    assert repr(name) in str(caught.value)
    for match in near:
        assert match in str(caught.value)
