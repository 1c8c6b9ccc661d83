"""Faults of the API on demand: the next so many calls of a method answer with an error."""

from __future__ import annotations

from dataclasses import dataclass

from tpu.emulator.errors import ApiError


@dataclass
class _Rule:
    method: str
    error: ApiError
    left: int
    after: bool


@dataclass(frozen=True)
class Fault:
    """The error to answer with. `after` means: do the work first, so that only the answer is lost."""

    error: ApiError
    after: bool


class Faults:
    """Rules in the order they were given; each is used up by the calls it fails."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []

    def add(self, method: str, error: ApiError, times: int, *, after: bool = False) -> None:
        """Let the next `times` calls of `method` (`*`: of any) fail."""
        if times < 1:
            raise ValueError(f"times must be 1 or more, found {times}")
        self._rules.append(_Rule(method, error, times, after))

    def take(self, method: str) -> Fault | None:
        """Return the fault that this call meets, and count it."""
        for rule in self._rules:
            if rule.method in (method, "*"):
                rule.left -= 1
                if rule.left == 0:
                    self._rules.remove(rule)
                return Fault(rule.error, rule.after)
        return None

    def clear(self) -> None:
        self._rules.clear()
