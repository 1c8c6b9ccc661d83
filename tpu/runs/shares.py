"""What each run of a pack pays of the chip that they share: equal parts, for as long as it trains. Pure.

A pack's history has its slices. Each of its runs has in its own history the share that it pays from a moment on, so
that the ledgers of all runs of a pack sum to that of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu.runs.event_log import RunEvent, candidate_of
from tpu.runs.ledger import Holding


@dataclass(frozen=True)
class Share:
    """From `at` on (seconds since 1970) one of `shared_by` equal parts of what its pack holds of a slice; nothing more
    of it if `shared_by` is 0."""

    slice: str
    at: float
    shared_by: int


def paid_last(events: Sequence[RunEvent]) -> Share | None:
    """What a run pays, as its own history has it."""
    for event in reversed(events):
        if event.kind == "share":
            return Share(event.detail["slice"], event.detail["at"], event.detail["shared_by"])
    return None


def next_shares(
    paid: Share | None, held: Sequence[Holding], shared_by: int, joined: float, now: float
) -> list[Share]:
    """How what a run pays changes when it is one of `shared_by` from `now` on; 0: it takes no part any more.

    `held` is what the pack has held, `joined` since when this driver carries the run (seconds since 1970).
    """
    pays = paid is not None and paid.shared_by > 0
    since = joined if paid is None else paid.at if pays else max(joined, paid.at)
    changes: list[Share] = []
    for one in held:
        start, end = one.start / 1e6, one.end / 1e6
        if not one.open and end <= since:
            continue
        if paid is not None and pays and paid.slice == one.slice:
            if not one.open:
                changes.append(Share(one.slice, end, 0))
            elif paid.shared_by != shared_by:
                changes.append(Share(one.slice, now, shared_by))
        elif shared_by:
            changes.append(Share(one.slice, max(start, since), shared_by))
            changes += [] if one.open else [Share(one.slice, end, 0)]
    return changes


def share_detail(share: Share, pack: Sequence[RunEvent]) -> dict[str, Any]:
    """What the run's history is to have of it: the slice is described as in that of the `pack`."""
    chips = next(
        e.detail["chips"]
        for e in reversed(pack)
        if e.kind in ("slice-intended", "slice-leased") and e.detail["slice"] == share.slice
    )
    return {**asdict(share), "chips": chips, **asdict(candidate_of(pack, share.slice))}
