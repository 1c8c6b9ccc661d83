"""Histories of runs for tests of what is computed from them: likely ones, and any at all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tpu.runs.event_log import RunEvent

PHASES = ("start", "restore", "compile", "step", "save", "evaluate", "idle", "other")
KINDS = (
    "driver-started", "slice-intended", "slice-leased", "slice-wanted", "provision-failed", "slice-ready",
    "slice-deleted", "slice-released", "sync-started", "sync-done", "attempt-started", "attempt-ended",
    "evaluation-wait-started", "evaluation-wait-done", "back-off", "one that a later version writes",
)  # fmt: skip
V4_8 = {"zone": "us-central2-b", "accelerator_type": "v4-8", "provisioning": "spot"}


def intended(time: float, name: str, price: float | None = 3.6, **detail: Any) -> RunEvent:
    return RunEvent(time, "slice-intended", V4_8 | {"slice": name, "price_an_hour": price} | detail)


def leased(time: float, name: str, chips: list[int], price: float | None = 3.6) -> RunEvent:
    return RunEvent(time, "slice-leased", V4_8 | {"slice": name, "price_an_hour": price, "chips": chips})


def at(time: float, kind: str, **detail: Any) -> RunEvent:
    return RunEvent(time, kind, detail)


def attempt_ended(time: float, number: int | None, name: str = "a", **detail: Any) -> RunEvent:
    known: dict[str, Any] = {
        "attempt": number, "slice": name, "verdict": "preempted", "reason": "gone", "evidence": [],
        "last_commit": None, "phases": [], "ended": time, "waste_from": None, "reached": 0, "commits": [],
    }  # fmt: skip
    return RunEvent(time, "attempt-ended", known | detail)


_times = st.floats(0, 100, allow_nan=False)
_names = st.sampled_from(["a", "b", "c"])
_prices = st.one_of(st.none(), st.floats(0, 1e4, allow_nan=False))


@st.composite
def histories(draw: st.DrawFn) -> list[RunEvent]:
    """Any events in any order, as drivers that die and return might leave them; only time goes on."""
    events: list[RunEvent] = []
    now = 1.7e9
    for _ in range(draw(st.integers(0, 25))):
        now += draw(_times)
        kind = draw(st.sampled_from(KINDS))
        name = draw(_names)
        if kind == "slice-intended":
            events.append(intended(now, name, draw(_prices)))
        elif kind == "slice-leased":
            events.append(leased(now, name, draw(st.lists(st.integers(0, 3), min_size=1, unique=True)),
                                 draw(_prices)))  # fmt: skip
        elif kind == "attempt-ended":
            events.append(draw(_ends(now, name)))
        elif kind == "back-off":
            events.append(at(now, kind, seconds=draw(_times)))
        else:
            events.append(at(now, kind, slice=name, attempt=1))
    return events


@st.composite
def _ends(draw: st.DrawFn, now: float, name: str) -> RunEvent:
    before = st.floats(now - 200, now, allow_nan=False)
    phases = sorted((draw(before), draw(st.sampled_from(PHASES))) for _ in range(draw(st.integers(0, 6))))
    return attempt_ended(
        now,
        draw(st.sampled_from([None, 1, 2])),
        name,
        phases=phases,
        ended=draw(before),
        waste_from=draw(st.one_of(st.none(), before)),
        reached=draw(st.sampled_from([None, 0, 40])),
        commits=sorted((draw(before), draw(st.integers(1, 60))) for _ in range(draw(st.integers(0, 4)))),
    )
