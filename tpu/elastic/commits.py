"""Who saves the state at a stop step: the first member; when it is lost the next one, from the state it has held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

# (step, state, committed): begin to save the state; call `committed` when it is.
Save = Callable[[int, Any, Callable[[], None]], None]


class Commits:
    """Holds the states of stop steps until the coordinator says that they are committed."""

    def __init__(
        self,
        save: Save | None,
        phase: Callable[[str, int], None],
        poke: Callable[[], None],
        leads: Callable[[bool], None] = lambda leads: None,
        committed: int = 0,
        heard: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.committed = committed
        self._on_leads, self._on_committed = leads, heard
        self._save, self._phase, self._poke = save, phase, poke
        self._lock = threading.Lock()
        self._held: dict[int, Any] = {}
        self._begun: set[int] = set()
        self._leads = False
        self._leaves_at = 0

    @property
    def settled(self) -> bool:
        """Whether the coordinator has heard that everything is committed."""
        with self._lock:
            return not self._held

    def hold(self, step: int, state: Any) -> None:
        """The state after a stop step."""
        if self._save is None:
            return
        with self._lock:
            if step > self.committed:
                self._held[step] = state
        self._begin()

    def nothing_to_save(self, step: int, state: Any) -> bool:
        """Whether this member may leave with the state after `step` steps: another one saves, or it is committed."""
        if self._save is None or not self._leads:
            return True
        if not self._leaves_at:
            self._leaves_at = step
            self.hold(step, state)
        return self.committed >= self._leaves_at

    def hear(self, committed: int, leads: bool) -> None:
        """What the coordinator says: everything up to `committed` is; `leads`: the others are ours to save."""
        with self._lock:
            news = committed > self.committed
            self.committed = max(self.committed, committed)
            self._held = {step: state for step, state in self._held.items() if step > self.committed}
            changed, self._leads = leads != self._leads, leads
        if news:
            self._on_committed(committed)
        if changed:
            self._on_leads(leads)
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            due = sorted(self._held.keys() - self._begun) if self._leads else []
            self._begun.update(due)
            states = [(step, self._held[step]) for step in due]
        for step, state in states:
            self._phase("committing", step)
            assert self._save is not None
            self._save(step, state, lambda step=step: self._done(step))

    def _done(self, step: int) -> None:
        with self._lock:
            self.committed = max(self.committed, step)
        self._poke()
