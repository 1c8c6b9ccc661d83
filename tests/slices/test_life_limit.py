"""An end that can be foreseen is met with a checkpoint ahead of it."""

from __future__ import annotations

import pytest

from tpu.slices.life_limit import life_s, save_at

HOUR = 3600.0


@pytest.mark.parametrize(
    ("provisioning", "life"),
    [
        ("spot", None),
        ("on-demand", None),
        ("reserved", None),
        ("preemptible", 24 * HOUR),
        ("flex-start", 2 * HOUR),
    ],
)
def test_P11_only_some_slices_have_an_end_that_can_be_foreseen(provisioning, life) -> None:
    assert life_s(provisioning, 2 * HOUR) == life
    assert (save_at(1000.0, provisioning, 2 * HOUR, 25.0) is None) == (life is None)


def test_P11_a_gang_is_told_to_save_in_time() -> None:
    assert save_at(1000.0, "preemptible", HOUR, 25.0) == (
        1000.0 + 24 * HOUR - 300.0,
        "a preemptible slice lives for 24 h",
    )
    # Who needs long for a checkpoint is told sooner; a short life is not spent on margins.
    assert save_at(0.0, "preemptible", HOUR, 400.0) == (
        24 * HOUR - 800.0,
        "a preemptible slice lives for 24 h",
    )
    assert save_at(0.0, "flex-start", 400.0, 25.0) == (200.0, "a flex-start slice lives for 0.111111 h")
    assert save_at(None, "preemptible", HOUR, 25.0) is None
