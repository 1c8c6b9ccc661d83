"""What can go wrong between here and a host."""

from __future__ import annotations

from collections.abc import Mapping


class HostUnreachable(RuntimeError):
    """Hosts that cannot be reached, or stopped answering. `reasons` has one sentence by host name."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in sorted(self.reasons.items())))


class HostKeyRefused(HostUnreachable):
    """A host shows another key than the one it published: it is not the machine that was asked for."""


class GangStartFailed(HostUnreachable):
    """A host could not start its part, so every other part was ended. `unconfirmed` may still run."""

    def __init__(self, reasons: Mapping[str, str], unconfirmed: Mapping[str, str]) -> None:
        self.unconfirmed = dict(unconfirmed)
        super().__init__(reasons)


class CommandFailed(RuntimeError):
    """A command on a host ended with another code than 0."""
