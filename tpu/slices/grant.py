"""A grant of chips, such as a quota of the TPU Research Cloud: what it covers costs nothing, what it does not may.

It is written as one line: `v4:us-central2-b:on-demand=32,spot=32; v6e:us-east1-d:spot=64`, generation, zone, and the
chips for each provisioning model. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from tpu.cloud.values import Provisioning
from tpu.slices.candidate import Candidate
from tpu.topology import ACCELERATOR_TYPES, SPOKEN_GENERATIONS, accelerator_type

EXAMPLE = "v4:us-central2-b:on-demand=32,spot=32; v6e:us-east1-d:spot=64"
_GENERATIONS = tuple(dict.fromkeys(kind.generation for kind in ACCELERATOR_TYPES.values()))

Share = tuple[str, str, str]


class GrantError(ValueError):
    """A grant cannot be understood; the message says which part, and how one is written."""


@dataclass(frozen=True)
class Grant:
    """Chips by generation, zone and provisioning model."""

    chips: Mapping[Share, int]

    def why_not(self, candidate: Candidate) -> str | None:
        """Why the grant does not cover a candidate; None if it does."""
        kind = accelerator_type(candidate.accelerator_type)
        granted = self.chips.get((kind.generation, candidate.zone, candidate.provisioning))
        if granted is None:
            return f"the grant (TPU_RELAY_GRANT) has no such chips; it has {self}"
        if granted < kind.chips:
            return f"it has {kind.chips} chips, and the grant (TPU_RELAY_GRANT) {granted} of them there"
        return None

    def __str__(self) -> str:
        return ", ".join(
            f"{chips} {provisioning} {generation} chips in {zone}"
            for (generation, zone, provisioning), chips in self.chips.items()
        )


def parse_grant(text: str) -> Grant:
    """Read a grant.

    Raises:
        GrantError: it cannot be understood.
    """
    chips: dict[Share, int] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        words = [word.strip() for word in part.split(":")]
        if len(words) != 3:
            raise _wrong(part, "it has not three parts")
        generation = SPOKEN_GENERATIONS.get(words[0].lower(), words[0].lower())
        if generation not in _GENERATIONS:
            raise _wrong(part, f"{words[0]!r} is no TPU generation ({', '.join(_GENERATIONS)})")
        for share in filter(None, (share.strip() for share in words[2].split(","))):
            model, equals, number = (word.strip() for word in share.partition("="))
            if model not in get_args(Provisioning):
                raise _wrong(part, f"{model!r} is none of {', '.join(get_args(Provisioning))}")
            if not equals or not number.isascii() or not number.isdigit() or int(number) == 0:
                raise _wrong(part, f"{share!r} has no number of chips")
            key = (generation, words[1], model)
            chips[key] = chips.get(key, 0) + int(number)
    if not chips:
        raise _wrong(text, "it grants nothing")
    return Grant(chips)


def _wrong(part: str, why: str) -> GrantError:
    return GrantError(
        f"TPU_RELAY_GRANT: {part.strip()!r} cannot be understood: {why}. Write it as {EXAMPLE!r}"
    )
