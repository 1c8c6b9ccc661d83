"""One way to get a slice: where, what, on which terms, and at what price. A run has several, in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tpu.cloud.values import Provisioning

# What can stand in the name of a zone at all; which ones there are says the cloud.
ZONE_PATTERN = r"^[a-z][a-z0-9-]*$"


@dataclass(frozen=True)
class Candidate:
    """A zone, an accelerator type in it, and the provisioning model.

    `price_an_hour` is US dollars for the whole slice, None if nobody has said.
    """

    zone: str
    accelerator_type: str
    provisioning: Provisioning
    price_an_hour: float | None = None

    @property
    def region(self) -> str:
        """The region of the zone: us-east5 for us-east5-b."""
        return region_of(self.zone)

    def __str__(self) -> str:
        return f"{self.provisioning} {self.accelerator_type} in {self.zone}"


def region_of(zone: str) -> str:
    """The region of a zone: us-east5 for us-east5-b."""
    return zone.rpartition("-")[0]
