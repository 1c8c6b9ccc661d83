"""Which accelerator types and images each emulated zone offers, and what their quotas are called."""

from __future__ import annotations

from tpu import topology

# The zones where people with small grants find TPUs; each generation exists somewhere.
GENERATIONS: dict[str, tuple[str, ...]] = {
    "us-central2-b": ("v4",),
    "us-central1-a": ("v5litepod", "v2", "v3"),
    "us-central1-b": ("v2", "v3"),
    "us-central1-f": ("v2", "v3"),
    "us-east1-d": ("v3", "v6e"),
    "us-east5-a": ("v5p", "v6e"),
    "us-east5-b": ("v6e", "v5p"),
    "us-west4-a": ("v5litepod",),
    "europe-west4-a": ("v3", "v5litepod", "v6e"),
    "europe-west4-b": ("v5litepod", "v5p"),
    "asia-northeast1-b": ("v6e",),
}

_QUOTA_STEMS = {
    "v2": "TPUV2s",
    "v3": "TPUV3s",
    "v4": "TPUV4s",
    "v5litepod": "TPUV5sLitepod",
    "v5p": "TPUV5P",
    "v6e": "TPUV6E",
}


def region(zone: str) -> str:
    """Return the region of a zone: `us-east5` for `us-east5-b`."""
    return zone.rpartition("-")[0]


def accelerator_types(zone: str) -> dict[str, topology.AcceleratorType]:
    """Return the types that a zone offers, by name; empty for an unknown zone."""
    offered = GENERATIONS.get(zone, ())
    return {name: kind for name, kind in topology.ACCELERATOR_TYPES.items() if kind.generation in offered}


def runtime_versions(zone: str) -> tuple[str, ...]:
    """Return the images that boot in a zone, sorted."""
    return tuple(sorted({kind.runtime_version for kind in accelerator_types(zone).values()}))


def quota_name(kind: topology.AcceleratorType, *, preemptible: bool) -> str:
    """Return the quota that slices of this kind count against, as the API spells it."""
    middle = "Preemptible" if preemptible else ""
    return f"{_QUOTA_STEMS[kind.generation]}{middle}PerProjectPerRegionForTPUAPI"
