"""What trials are compared by, and which of its values counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tpu.train.form import plain_optionals

EVALUATION = "evaluation/"


class Metric(BaseModel):
    """What is compared."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)

    name: str = Field(
        default="loss",
        description="As the program logs it; or evaluation/FIGURE, of the evaluation of its last checkpoint.",
        examples=["loss", "evaluation/new.delta_ridge"],
    )
    goal: Literal["minimize", "maximize"] = Field(default="minimize", description="Which values are better.")
    value: Literal["last", "min", "max"] = Field(
        default="last", description="Which of the values that a trial has logged so far is its own."
    )

    @property
    def figure(self) -> str | None:
        """The figure of an evaluation, what is nested with dots; None if the program logs the metric."""
        return self.name.removeprefix(EVALUATION) if self.name.startswith(EVALUATION) else None

    def of(self, values: Iterable[float]) -> float:
        """The value that counts of those logged, in their order; there is at least one."""
        if self.value == "last":
            *_, last = values
            return last
        return (min if self.value == "min" else max)(values)


def drawn_by_step(metric: str) -> str:
    """What is drawn of a trial by step: its metric; the loss if that is an evaluation's, which is known at the end."""
    return "loss" if metric.startswith(EVALUATION) else metric
