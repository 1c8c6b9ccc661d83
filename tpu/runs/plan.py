"""Where a run is cut into segments: a pure function of the rule and the number of steps."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tpu.train.form import form

# All stop steps stand in one environment variable of the program, and the kernel takes 128 KiB of one.
MOST_SEGMENTS = 10_000


class CheckpointRule(BaseModel):
    """At which steps a checkpoint is planned; exactly one of `every`, `log_spaced` and `at`."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=form(("every", "keep_last")))

    every: int | None = Field(default=None, ge=1, description="Every so many steps.")
    log_spaced: int | None = Field(
        default=None, ge=1, description="So many steps, evenly spaced on a logarithmic scale from 1."
    )
    at: list[int] | None = Field(default=None, min_length=1, description="At these steps.")
    keep_last: int | None = Field(
        default=None, ge=2, description="Keep only this many newest checkpoints; all if empty."
    )
    keep_every: int | None = Field(
        default=None, ge=1, description="With keep_last: also keep multiples of this step."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> CheckpointRule:
        given = [name for name in ("every", "log_spaced", "at") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of every, log_spaced and at; found {' and '.join(given)}")
        return self


def stop_steps(rule: CheckpointRule, steps: int) -> tuple[int, ...]:
    """Steps at which segments of a run of `steps` steps end, ascending; the last is always `steps`.

    Without a rule there are five even segments.

    Raises:
        ValueError: a step of `at` lies outside 1…steps, or there are more than MOST_SEGMENTS.
    """
    if rule.at is not None:
        outside = [step for step in rule.at if not 1 <= step <= steps]
        if outside:
            raise ValueError(f"checkpoints.at: {outside[0]} is not between 1 and steps = {steps}")
        stops = set(rule.at)
    elif rule.log_spaced is not None:
        count = rule.log_spaced
        _check_number(count, steps)
        stops = {round(steps ** (i / max(count - 1, 1))) for i in range(count)}
    else:
        every = rule.every or max(1, -(-steps // 5))
        _check_number(steps // every, steps)
        stops = set(range(every, steps + 1, every))
    _check_number(len(stops), steps)
    return tuple(sorted(stops | {steps}))


def _check_number(stops: int, steps: int) -> None:
    """Before they are made: a slip of the pen in `steps` must not fill the memory."""
    if stops > MOST_SEGMENTS:
        raise ValueError(
            f"checkpoints: {stops} of them in {steps} steps, more than {MOST_SEGMENTS}: take them less often"
        )
