"""What slice is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tpu.cloud import PREEMPTIBLE, Provisioning
from tpu.slices.candidate import Candidate
from tpu.topology import accelerator_type


@dataclass(frozen=True)
class SliceRequest:
    """A slice to be made: where, what, how it is paid for, how it is reached.

    `deadline_s` is how long it may take from the request until the slice is ready; a creation that is slow
    is no failure before that. `network`, `subnetwork` and `service_account` are the project's defaults if
    None. `metadata` becomes instance attributes of every host: ssh-keys, startup-script and the like.
    `max_run_s` is the life of a flex-start slice; the others have none.

    Raises:
        UnknownAcceleratorType: there is no such type.
        ValueError: the deadline is not above 0.
    """

    zone: str
    accelerator_type: str
    provisioning: Provisioning = "spot"
    runtime_version: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    service_account: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 3600.0
    max_run_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        accelerator_type(self.accelerator_type)
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, found {self.deadline_s}")

    @property
    def image(self) -> str:
        """The runtime version asked for, else the default of the accelerator type."""
        return self.runtime_version or accelerator_type(self.accelerator_type).runtime_version

    @property
    def spot(self) -> bool:
        """True if the cloud may take the slice away at any time."""
        return self.provisioning in PREEMPTIBLE

    def of(self, candidate: Candidate) -> SliceRequest:
        """The same wish, fulfilled in this candidate's way."""
        return replace(
            self,
            zone=candidate.zone,
            accelerator_type=candidate.accelerator_type,
            provisioning=candidate.provisioning,
        )
