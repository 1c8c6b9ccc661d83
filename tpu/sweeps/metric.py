"""What trials are compared by, and which of its values counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tpu.train.form import plain_optionals


class Metric(BaseModel):
    """What is compared."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=plain_optionals)

    name: str = Field(default="loss", description="As the program logs it.")
    goal: Literal["minimize", "maximize"] = Field(default="minimize", description="Which values are better.")
    value: Literal["last", "min", "max"] = Field(
        default="last", description="Which of the values that a trial has logged so far is its own."
    )

    def of(self, values: Iterable[float]) -> float:
        """The value that counts of those logged, in their order; there is at least one."""
        if self.value == "last":
            *_, last = values
            return last
        return (min if self.value == "min" else max)(values)
