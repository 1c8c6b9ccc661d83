"""Records by resource name, kept in order by zone, so that one page of a list costs that page alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol, TypeVar

from tpu.emulator.names import Location


class Located(Protocol):
    @property
    def location(self) -> Location: ...


Record = TypeVar("Record", bound=Located)


class Records(dict[str, Record]):
    """A dict that knows its names by zone, sorted, and tells `counted` of each record that comes (+1) or goes (-1).

    Records come by assignment and go by `del`, `pop` and `clear`.
    """

    def __init__(self, counted: Callable[[Record, int], None]) -> None:
        super().__init__()
        self._counted = counted
        self._names: dict[str, list[str]] = {}

    def names(self, zone: str) -> list[str]:
        """Return the names in a zone, sorted; of all zones for `-`. Not to be changed."""
        return sorted(self) if zone == "-" else self._names.get(zone, [])

    def __setitem__(self, name: str, record: Record) -> None:
        if name in self:
            del self[name]
        super().__setitem__(name, record)
        insort(self._names.setdefault(record.location.zone, []), name)
        self._counted(record, 1)

    def __delitem__(self, name: str) -> None:
        record = self[name]
        super().__delitem__(name)
        names = self._names[record.location.zone]
        del names[bisect_left(names, name)]
        self._counted(record, -1)

    def pop(self, name: str, default: Record | None = None) -> Record | None:  # type: ignore[override]
        record = self.get(name, default)
        if name in self:
            del self[name]
        return record

    def clear(self) -> None:
        for name in list(self):
            del self[name]
