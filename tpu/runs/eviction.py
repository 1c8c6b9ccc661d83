"""When an evicted run leaves: at its next commit, or when that takes too long. Pure."""

from __future__ import annotations

from tpu.slices.lease import Claim


class Eviction:
    """Of one attempt; `patience_s` is how long it may take to its next commit."""

    def __init__(self) -> None:
        self._told: tuple[float, int] | None = None  # when, and what was committed then

    def why_leave(self, claim: Claim | None, committed: int, now: float, patience_s: float) -> str | None:
        """Why the gang is to be ended now; None as long as it goes on. `now` is monotonic, in seconds."""
        if claim is None:  # the other run does not want it any more
            self._told = None
            return None
        since, before = self._told = self._told or (now, committed)
        if committed <= before and now - since < patience_s:
            return None
        return f"evicted by run {claim.run} (priority {claim.priority})"
