"""How large a pool may be, and how long what nobody uses is kept: pool.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpu.slices.candidate import Candidate

NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"


class PoolSettingsError(ValueError):
    """Settings of a pool that cannot be; the message says which and what to write."""


def checked_name(name: str) -> str:
    """The name of a pool as it came.

    Raises:
        PoolSettingsError: no run could name it.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise PoolSettingsError(
            "a pool is named by lower-case letters, digits and dashes, at most 40, a letter first and no dash last; "
            f"found {name!r}"
        )
    return name


def in_minutes(minutes: float) -> str:
    """When an evicted run that has not committed is stopped; nothing is left once its time is over."""
    if minutes <= 0:
        return "at once"
    if minutes < 1:
        return f"in {math.ceil(minutes * 60)} s at the latest"
    return f"in {round(minutes, 1):g} minute{'' if minutes == 1 else 's'} at the latest"


@dataclass(frozen=True)
class PoolSettings:
    """The settings of one pool.

    A slice that nobody holds is kept for `idle_minutes` (0: a run deletes its slice when it ends), and longer while
    the pool has no more than `min_slices`. `max_slices` counts all that are not gone, None is without limit. Who is
    evicted by a run of higher priority has `evict_minutes` to come to its next commit; then it is ended as by a
    preemption notice. `candidates` are the ways to get the slices of `min_slices`, in order.

    Raises:
        PoolSettingsError: a negative or infinite number, more slices at least than at most, or no way to get them.
    """

    idle_minutes: float = 0.0
    min_slices: int = 0
    max_slices: int | None = None
    evict_minutes: float = 10.0
    candidates: tuple[Candidate, ...] = ()

    def leaves(self, who: Sequence[str]) -> str:
        """In words: when these runs leave once they are evicted."""
        verb = "leaves at its" if len(who) == 1 else "leave at their"
        return f"{', '.join(who) or 'nobody'} {verb} next commit, or {in_minutes(self.evict_minutes)}"

    def __post_init__(self) -> None:
        for name in ("idle_minutes", "min_slices", "max_slices", "evict_minutes"):
            value = getattr(self, name)
            if name == "max_slices" and value is None:
                continue
            whole = name.endswith("_slices")
            kind = int if whole else (int, float)
            # Neither holds for what is no number, such as nan.
            if isinstance(value, bool) or not isinstance(value, kind) or not (0 <= value < math.inf):
                raise PoolSettingsError(
                    f"{name} must be a {'whole ' if whole else ''}number of 0 or more, found {value!r}"
                )
        if self.max_slices is not None and self.min_slices > self.max_slices:
            raise PoolSettingsError(
                f"min_slices {self.min_slices} is more than max_slices {self.max_slices}: lower one or raise the other"
            )
        if self.min_slices and not self.candidates:
            raise PoolSettingsError(
                f"min_slices {self.min_slices} wants candidates: which slices are to be kept?"
            )

    @classmethod
    def from_json(cls, data: bytes) -> PoolSettings:
        """Settings as they are kept; fields that this version does not know are left out.

        Raises:
            PoolSettingsError: it is no such thing.
        """
        try:
            values = json.loads(data)
            values["candidates"] = tuple(Candidate(**c) for c in values.get("candidates", ()))
            return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})
        except (ValueError, TypeError, AttributeError) as error:
            raise PoolSettingsError(f"pool.json cannot be understood ({error}): {data[:200]!r}") from error
