"""Where a run's coordinator is: an object in the run's folder, changed by compare-and-set alone.

Whoever finds none, or one that does not answer, becomes it. So it lives on a host of some slice, where all others
reach it, and needs no flow. The key by which members know each other is made once a run, and stands only here.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from tpu.checkpoint import objects
from tpu.checkpoint.retry import StorageUnavailable
from tpu.elastic.control import Address

# One that was asked for so often within WINDOW_S, by one member, does not answer.
TRIES, WINDOW_S = 3, 20.0


@dataclass(frozen=True)
class Place:
    """`host` and `port` are where the coordinator of `term` listens."""

    term: int
    host: str
    port: int
    key: str = field(repr=False)

    @property
    def address(self) -> Address:
        return self.host, self.port


def place_url(run_dir: str) -> str:
    return f"{run_dir}/coordinator.json"


def look(run_dir: str) -> tuple[Place, int] | None:
    """The coordinator's place and the generation of that statement; None if there never was one.

    Raises StorageUnavailable if the bucket does not answer.
    """
    found = objects.read(place_url(run_dir))
    return (Place(**json.loads(found[0])), found[1]) if found else None


def settle(run_dir: str, address: Address, key: str, over: tuple[Place, int] | None) -> Place | None:
    """Say that the coordinator is at `address` now, in place of the one that was seen; None if another was quicker."""
    host, port = address
    place = Place(1 + (over[0].term if over else 0), host, port, key)
    content = json.dumps(asdict(place)).encode()
    try:
        if over is None:
            objects.create_exclusive(place_url(run_dir), content)
        else:
            objects.compare_and_set(place_url(run_dir), content, over[1])
    except (objects.ObjectExists, objects.StaleGeneration):
        return None
    return place


class Serves(Protocol):
    """A coordinator of this process."""

    port: int

    def watch(self, place: Place) -> None:
        """End once another one stands in the bucket."""
        ...

    def end(self) -> None: ...


class Finder:
    """Called for each try to reach the coordinator: its address now. `serve(key)` begins one here, if need be."""

    def __init__(
        self,
        run_dir: str,
        host: str,
        serve: Callable[[str], Serves],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ours: Serves | None = None
        self._run_dir, self._host = run_dir, host
        self._serve, self._clock = serve, clock
        self._asked: list[float] = []
        self._term = 0

    def __call__(self) -> Address:
        """Raises OSError if the bucket does not answer."""
        return self.place().address

    def place(self) -> Place:
        """As a call, with the key."""
        try:
            while True:
                found = look(self._run_dir)
                if found is not None and not self._gives_up(found[0]):
                    return found[0]
                if (taken := self._take(found)) is not None:
                    return taken
        except StorageUnavailable as error:
            raise OSError(f"where the coordinator is cannot be read: {error}") from error

    def is_current(self) -> bool:
        """Whether the coordinator that was named last is the run's still. Raises StorageUnavailable."""
        found = look(self._run_dir)
        return found is not None and found[0].term == self._term

    def _gives_up(self, place: Place) -> bool:
        now = self._clock()
        if place.term != self._term:
            self._term, self._asked = place.term, []
        self._asked = [at for at in self._asked if now - at < WINDOW_S] + [now]
        return len(self._asked) > TRIES

    def _take(self, over: tuple[Place, int] | None) -> Place | None:
        key = over[0].key if over else secrets.token_hex(16)
        serving = self._serve(key)
        place = settle(self._run_dir, (self._host, serving.port), key, over)
        if place is None:
            serving.end()
            return None
        if self.ours is not None:
            self.ours.end()
        self.ours, self._term, self._asked = serving, place.term, []
        serving.watch(place)
        return place
