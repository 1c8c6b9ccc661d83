"""One dimension of a search space, in our words, which are those of Weights & Biases sweep files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from tpu.train.form import plain_optionals

# What a parameter may be; lists and mappings too, as the items of `values`.
Value = Any
# A whole number stays one: a range between two of them has whole numbers only.
_Number = Annotated[int | float, WithJsonSchema({"type": "number"})]

# Of Weights & Biases, as written there -> (logarithmic, steps of q, whole numbers).
_RANGES = {
    "uniform": (False, False, False),
    "q_uniform": (False, True, False),
    "int_uniform": (False, False, True),
    "log_uniform": (True, False, False),
    "log_uniform_values": (True, False, False),
}
_NOT_SUPPORTED = (
    "q_log_uniform", "q_log_uniform_values", "inv_log_uniform", "inv_log_uniform_values", "normal", "q_normal",
    "log_normal", "q_log_normal", "beta", "q_beta",
)  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both among them."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False


class Parameter(BaseModel):
    """One parameter: `value`, `values`, or numbers from `min` to `max`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=plain_optionals
    )

    value: Any = Field(default=None, description="The same in every trial.")
    values: list[Any] | None = Field(default=None, description="One of these.", examples=[[0.001, 0.003]])
    min: _Number | None = Field(default=None, description="Least number.")
    max: _Number | None = Field(default=None, description="Greatest number.")
    log: bool = Field(default=False, description="Draw evenly on a logarithmic scale.")
    step: _Number | None = Field(default=None, gt=0, description="Only min, min + step, and so on.")
    q: _Number | None = Field(default=None, gt=0, description="`step`, as Weights & Biases calls it.")
    distribution: str | None = Field(
        default=None,
        description="Of Weights & Biases: " + ", ".join(("constant", "categorical", *_RANGES)) + ".",
    )
    when: dict[str, Any] | None = Field(
        default=None,
        description="Only in trials in which an earlier parameter has this value, or one of these.",
        examples=[{"training.optimizer.schedule": ["triangle", "cosine"]}],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        if self.distribution in _NOT_SUPPORTED:
            raise ValueError(f"distribution {self.distribution} is not supported; take one of {_known()}")
        if self.distribution not in (None, "constant", "categorical", *_RANGES):
            raise ValueError(f"there is no distribution {self.distribution}; there are {_known()}")
        given = [
            what
            for what, is_given in (
                ("value", "value" in self.model_fields_set and self.value is not None),
                ("values", self.values is not None),
                ("min and max", self.min is not None or self.max is not None),
            )
            if is_given
        ]
        if "value" in self.model_fields_set and self.value is None and not given:
            given = ["value"]  # null is a value, too
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give one of value, values, or min and max; found {found}")
        if self.values == []:
            raise ValueError("values is empty: there is nothing to try")
        if (twice := _twice(self.values or [self.value])) is not None:
            raise ValueError(f"{twice} stands there twice: its trials would be the same ones")
        if given == ["min and max"]:
            self._check_range()
        return self

    def _check_range(self) -> None:
        if self.min is None or self.max is None:
            raise ValueError("give both min and max")
        span = self.span
        if not span.low < span.high:
            raise ValueError(f"min {self.min} is not below max {self.max}")
        if span.log and span.low <= 0:
            raise ValueError(f"a logarithmic scale begins above 0; found min {self.min}")
        if span.log and span.step is not None:
            raise ValueError("a logarithmic scale has no step")
        if span.whole and (span.low != int(span.low) or span.high != int(span.high)):
            raise ValueError(f"int_uniform goes between whole numbers; found {self.min} and {self.max}")

    @property
    def span(self) -> Range:
        """The numbers from min to max."""
        assert self.min is not None
        assert self.max is not None
        low, high, step = self.min, self.max, self.step or self.q
        if self.distribution is None:
            whole = isinstance(low, int) and isinstance(high, int) and (step is None or isinstance(step, int))
            return Range(low, high, self.log, step, whole)
        log, _, whole = _RANGES[self.distribution]
        if self.distribution == "log_uniform":  # Weights & Biases: the limits are exponents of e
            low, high = math.exp(low), math.exp(high)
        return Range(low, high, log or self.log, step, whole)

    @property
    def choices(self) -> Sequence[Value] | None:
        """Every value that it may have, not made before it is asked for; None if there are too many to be counted."""
        if self.values is not None:
            return self.values
        if self.min is None:
            return [self.value]
        span = self.span
        if span.whole and not span.log:
            return range(int(span.low), int(span.high) + 1, int(span.step or 1))
        return None

    @property
    def samples(self) -> list[Value]:
        """A few values that it may have, among them the extreme ones."""
        if self.min is None:
            return list(self.choices or [])[:64]
        span = self.span
        return [int(span.low), int(span.high)] if span.whole else [span.low, span.high]

    def allows(self, value: Value) -> bool:
        """Whether it may have this value."""
        if self.min is None:
            return value in (self.choices or ())
        span = self.span
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not span.low <= value <= span.high
        ):
            return False
        steps = (value - span.low) / (span.step or 1.0)
        on_a_step = math.isclose(steps, round(steps), abs_tol=1e-9)
        return on_a_step if span.step else not span.whole or value == int(value)

    def applies(self, chosen: Mapping[str, Value]) -> bool:
        """Whether a trial that has `chosen` for the parameters before has this one, too."""
        for name, wanted in (self.when or {}).items():
            if name not in chosen or chosen[name] not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return True


def _twice(values: Sequence[Value]) -> str | None:
    """A value that equals an earlier one: 1 and 1.0 are the same number, 1 and true are not.

    Raises:
        ValueError: a value is of a kind that YAML has and JSON has not, such as a date.
    """
    seen: set[tuple[str, Any]] = set()
    for value in values:
        try:
            text = json.dumps(value, sort_keys=True)
        except TypeError:
            raise ValueError(f"{value} is read as a {type(value).__name__}: put it into quotes") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        key = ("number", value) if number else ("other", text)
        if key in seen:
            return text
        seen.add(key)
    return None


def canonical(values: Mapping[str, Value]) -> str:
    """Text of a point of the space that is the same whoever writes it."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _known() -> str:
    return ", ".join(("constant", "categorical", *_RANGES))
