"""When the cloud ends a slice whatever happens: what can be foreseen is met with a checkpoint. Pure."""

from __future__ import annotations

from tpu.cloud.values import PREEMPTIBLE_LIFE_S, Provisioning

# A checkpoint is asked for so long before the end: it may be large, and clocks differ.
SAVE_BEFORE_S = 300.0


def life_s(provisioning: Provisioning, max_run_s: float) -> float | None:
    """How long a slice lives at most, in seconds; `max_run_s` is what a flex-start one was asked for.

    None: until it is deleted, or taken away without warning.
    """
    if provisioning == "preemptible":
        return PREEMPTIBLE_LIFE_S
    return max_run_s if provisioning == "flex-start" else None


def save_at(
    created: float | None, provisioning: Provisioning, max_run_s: float, grace_s: float
) -> tuple[float, str] | None:
    """When a gang is told to save, and the sentence that says why; None if no end can be foreseen.

    `created` and the answer are seconds since the epoch; `grace_s` is what the gang gets for saving.
    """
    limit = life_s(provisioning, max_run_s)
    if limit is None or created is None:
        return None
    # A short life is not spent on margins.
    margin_s = min(max(SAVE_BEFORE_S, 2 * grace_s), limit / 2)
    return created + limit - margin_s, f"a {provisioning} slice lives for {limit / 3600:g} h"
