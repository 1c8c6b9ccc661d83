"""The cloud's word is waited for where it may lag behind, and never for ever."""

from __future__ import annotations

import asyncio

import pytest

from tpu.emulator.simulation_clock import VirtualClock, run_virtual
from tpu.runs.trouble import CLOUD_LAG_S, CLOUD_WORD_S, SLICE_LAG_S, condition_after_trouble
from tpu.slices.condition import Condition, LifeView

WELL = LifeView(Condition.READY_HEALTHY, "the node is READY")
TAKEN = LifeView(Condition.LOST, "the node is PREEMPTED", preempted=True)
REPAIRED = LifeView(Condition.RECOVERING, "the node is REPAIRING")
UNKNOWN = LifeView(Condition.UNKNOWN, "cloud not reachable")


@pytest.mark.parametrize(
    ("story", "said", "all_lost", "answer", "after_s"),
    [
        ("well, and one host lost", [(0.0, WELL)], False, WELL, CLOUD_LAG_S),
        ("well, and all lost", [(0.0, WELL)], True, WELL, SLICE_LAG_S),
        ("taken", [(0.0, TAKEN)], True, TAKEN, 0.0),
        ("taken a moment later", [(0.0, WELL), (1.0, TAKEN)], False, TAKEN, 1.0),
        ("one host lost, taken too late to wait for", [(0.0, WELL), (8.0, TAKEN)], False, WELL, CLOUD_LAG_S),
        ("all lost, and the cloud lags", [(0.0, WELL), (8.0, TAKEN)], True, TAKEN, 8.0),
        ("all lost, under repair", [(0.0, WELL), (3.0, REPAIRED)], True, REPAIRED, 3.0),
        ("silent, then taken", [(0.0, UNKNOWN), (30.0, TAKEN)], False, TAKEN, 30.0),
        ("silent for ever", [(0.0, UNKNOWN)], True, UNKNOWN, CLOUD_WORD_S),
    ],
)
def test_how_long_the_cloud_is_asked(
    story: str, said: list[tuple[float, LifeView]], all_lost: bool, answer: LifeView, after_s: float
) -> None:
    async def ask() -> tuple[LifeView, float]:
        loop = asyncio.get_running_loop()

        async def look() -> LifeView:
            return [view for since, view in said if since <= loop.time()][-1]

        return await condition_after_trouble(look, VirtualClock(), all_lost), loop.time()

    found, took_s = run_virtual(ask())
    assert found == answer, story
    assert after_s <= took_s <= after_s + 1.0
