"""Which limit is a candidate's, and whether one slice fits under it."""

from __future__ import annotations

import pytest

from tpu.cloud.project import Quota
from tpu.readiness.finding import State
from tpu.readiness.rights import quota
from tpu.slices.candidate import Candidate

ZONE = "us-central1-a"


def limit(name: str, number: int | None, *places: str) -> Quota:
    return Quota(f"{name}ForTPUAPI", frozenset(places or (ZONE,)), number)


@pytest.mark.parametrize(
    ("kind", "provisioning", "known", "state"),
    [
        ("v5litepod-8", "spot", [limit("TPUV5sPreemptibleLitepodPerProjectPerZone", 8)], State.HOLDS),
        ("v5litepod-8", "spot", [limit("TPUV5sPreemptibleLitepodPerProjectPerZone", 4)], State.WRONG),
        ("v5litepod-8", "spot", [limit("TPUV5sLitepodPerProjectPerZone", 64)], State.UNKNOWN),
        ("v5litepod-8", "on-demand", [limit("TPUV5sLitepodPerProjectPerZone", 64)], State.HOLDS),
        # v5p is another generation than v5 "s" with "Preemptible" in its name.
        ("v5p-8", "spot", [limit("TPUV5sPreemptibleLitepodPerProjectPerZone", 64)], State.UNKNOWN),
        ("v5p-8", "spot", [limit("TPUV5PPreemptiblePerProjectPerZone", 4)], State.HOLDS),
        ("v6e-8", "flex-start", [limit("TPUV6EPreemptiblePerProjectPerRegion", None, "us-central1")], State.HOLDS),
        ("v6e-8", "spot", [limit("TPUV6EPreemptiblePerProjectPerZone", 64, "us-east1-d")], State.UNKNOWN),
        # Of the quotas of single devices and of pods the larger one counts.
        (
            "v3-32", "spot",
            [limit("TPUV3sPreemptiblePerProjectPerZone", 8), limit("TPUV3sPreemptiblePodPerProjectPerZone", 64)],
            State.HOLDS,
        ),
        ("v4-8", "reserved", [limit("TPUV4sPerProjectPerZone", 0)], State.UNKNOWN),
        ("v4-8", "on-demand", [limit("TPUV4sReservedPerProjectPerZone", 64)], State.UNKNOWN),
    ],
)  # fmt: skip
def test_one_slice_fits_or_not(kind: str, provisioning: str, known: list[Quota], state: State):
    assert quota(known, Candidate(ZONE, kind, provisioning), "p").state is state  # type: ignore[arg-type]
