"""Where one host of a slice is reached, and by which key it is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostAddress:
    """One TPU VM.

    `host_key` is the public SSH host key that the VM published ("ssh-ed25519 AAAA…"). `zone` and `hostname`
    (the VM's own name) are needed by the `iap` route alone.
    """

    slice: str
    index: int
    internal: str
    external: str | None = None
    host_key: str | None = None
    zone: str | None = None
    hostname: str | None = None

    @property
    def name(self) -> str:
        """Short and unique within a gang; also the name of the host's log in the bucket."""
        return f"{self.slice}-w{self.index}"
