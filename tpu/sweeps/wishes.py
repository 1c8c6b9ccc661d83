"""What people want of a sweep beside its file, while it runs or before it goes on: wishes.json, by compare-and-set.

Whoever drives the sweep looks at it every few seconds. It is `taken` while somebody does, and given back by a change of
the same object, so that no wish falls between two looks of which the second never comes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpu.checkpoint import objects

_TRIES = 20


class MalformedWishes(ValueError):
    """wishes.json cannot be read; the message shows what it holds."""


class WishesContended(RuntimeError):
    """Others changed the wishes at every try; it may be tried again."""


@dataclass(frozen=True)
class Wishes:
    """`runs` raises how many are drawn in all; `added` are points in the order in which they were wished for;
    `cancelled` are numbers of trials that are not to be trained any further."""

    priority: int | None = None
    runs: int | None = None
    added: tuple[Mapping[str, Any], ...] = ()
    cancelled: tuple[int, ...] = ()
    taken: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Wishes:
        try:
            values = json.loads(data)
            return cls(**values | {name: tuple(values[name]) for name in ("added", "cancelled")})
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedWishes(f"wishes.json cannot be understood ({error!r}): {data[:200]!r}") from error


class WishBox:
    """The wishes of one sweep. `wishes` are those that were read last."""

    def __init__(self, sweep_dir: str) -> None:
        self.wishes = Wishes()
        self._url = f"{sweep_dir}/wishes.json"
        self._generation: int | None = None

    def read(self) -> Wishes:
        """Raises MalformedWishes."""
        found = objects.read(self._url)
        self.wishes, self._generation = (Wishes.from_json(found[0]), found[1]) if found else (Wishes(), None)
        return self.wishes

    def change(self, change: Callable[[Wishes], Wishes]) -> Wishes:
        """Apply a pure change, anew as often as others come first.

        Raises:
            WishesContended: others came first too often.
        """
        for _ in range(_TRIES):
            self.read()
            if self._write(change(self.wishes)):
                return self.wishes
        raise WishesContended(f"others changed {self._url} at each of {_TRIES} tries: try again")

    def give_back(self) -> bool:
        """Nobody looks at it from now on; False if it holds what was not read yet."""
        return self._write(replace(self.wishes, taken=False))

    def _write(self, wishes: Wishes) -> bool:
        if wishes == self.wishes:
            return True
        try:
            if self._generation is None:
                self._generation = objects.create_exclusive(self._url, wishes.to_json())
            else:
                self._generation = objects.compare_and_set(self._url, wishes.to_json(), self._generation)
        except (objects.StaleGeneration, objects.ObjectExists):
            return False
        self.wishes = wishes
        return True
